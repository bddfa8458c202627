"""Every published number, repeatable: stock PEFT and hirank side by side in one process."""
