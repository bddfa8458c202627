"""A training script that has never heard of hirank: Transformers' Trainer and PEFT.

python plain_trainer.py MODEL ROWS.jsonl OUT [--dora]
hirank run -- python plain_trainer.py MODEL ROWS.jsonl OUT --dora
"""

import argparse
import json
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("out")
    parser.add_argument("--dora", action="store_true")
    given = parser.parse_args()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    config = LoraConfig(
        r=4, use_dora=given.dora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(given.model), config)
    arguments = TrainingArguments(
        given.out,
        max_steps=6,
        logging_steps=1,
        save_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        model,
        arguments,
        train_dataset=[encoded(tokenizer, line) for line in given.rows.open(encoding="utf-8")],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ).train()


def encoded(tokenizer, line: str) -> dict[str, list[int]]:
    text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
    return {"input_ids": tokenizer(text)["input_ids"]}


if __name__ == "__main__":
    main()
