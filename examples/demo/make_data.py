"""Generate the demo's task: read an order written in plain English, write it as one JSON record.

    in    Hi, Maria Novak here. Please send three red lamps to Boston by 4 March. PO 88213.
    out   {"name":"Maria Novak","item":"red lamps","qty":3,"city":"Boston","date":"4 Mar"}

Everything is invented here, from the word lists and templates below and a seed, so there is no
licence to ask about. The answer is judged by exact string match, so it has one form only:
keys in the order of `KEYS`, no spaces between the parts, `qty` a number, `date` like "4 Mar".
`name`, `item` and `city` are copied from the sentence, `qty` and `date` may be written otherwise
there ("three", "the 4th of March").

The held-out rows are held out in earnest. No first name, surname, word of an item, city, date or
kind of distracting detail of theirs occurs in a training row; every second one (the rows with
odd numbers, counted from 0) is also phrased by a template that no training row uses.

The same arguments give the same bytes everywhere: only `Random.random()` is used, the one
generator whose sequence Python promises to keep.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random

KEYS = ("name", "item", "qty", "city", "date")
HOLD_OUT_EVERY = 4
"""Each word list gives its every fourth entry to the held-out rows and the rest to training."""


def entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(",")]


# First names, kinds and cities begin with a common word. A tokenizer spells a word that follows a
# quotation mark otherwise than after a space; rare words would test spelling instead of reading.

FIRST_NAMES = """
James Mary Robert Anna Michael Sarah William Emily David Maria Richard Elizabeth Joseph Alice
Thomas Jane Charles Rose Daniel Lily Matthew Kim Mark Donald Paul Andrew Anne George Marie Edward
Jacob Maya Stephen Jean Scott Samuel Alexander Frank Jack Adam Henry Peter Max Alex Sam Ben Tom Tim
Jim Bob Bill Dan Ken Don Ray Carl John Ali Arthur Simon Martin Victor Louis Neil Jeff Greg Chris
Matt Nick Pat Fred Jamie Grant Lee Ross Taylor Earl Christian Michel Luke Stan Rob Ann
""".split()

SURNAMES = """
Novak Baker Sharma Moreau Larsen Haddad Martinez Petrov Diallo Walsh Rossi Klein Rahimi Fischer
Costa Wright Berg Mendez Tanaka Hughes Okafor Khan Popescu Lind Cohen Alvarez Schmidt Mensah
Turner Kowalski Malik Dubois Chen Murphy Hassan Weber Brown Patel Wilson Ferrari Volkov Wagner
Gomez Cooper Nolan Horvat Santos Reid Aziz Evans Conti Palmer Nowak Sato Barnes Ortega Fraser
Gupta Keller Stewart Yilmaz Olsen Dawson Qureshi Bianchi Holm Adeyemi Foster Lopez Jansen Rao
Sullivan Kaya Meyer Pereira Watson Ito Dahl Greco Bennett Castillo Singh Bauer Lefevre Morgan
Amiri Hansen Vargas Kelly Marino Zhang Hoffman Silva Osei Parker Novotny Reyes Bishop Tran Laurent
Iqbal Carter Schneider Romano Lindgren Ndlovu Harper Ruiz Sokolov Gray Fontaine Desai Becker
Molina Shaw Karlsson Baptiste Yamada Griffin
""".split()

KINDS = """
blue large metal plastic black office glass small green travel paper winter red round white heavy
school yellow summer tall grey gold brown orange purple dark light soft hard old new big long short
wide thick thin flat square double plain classic modern standard special strong home baby water
wind solar electric wood wire iron table wall door window bath boat forest music art safety party
spring night canvas clay
""".split()

THINGS = entries("""
lamps, chairs, mugs, hoses, brushes, bottles, towels, helmets, frames, jackets, boxes, knives,
blankets, tables, glasses, mats, pots, shelves, plates, cables, belts, bags, clocks, tents, bowls,
gloves, mirrors, beds, baskets, buckets, shirts, adapters, boards, boots, fans, badges, blinds,
cards, vests, rugs, cases, trays, ladders, holders, bulbs, stands, shovels, stools, curtains,
covers, leads, feeders, pillows, jugs, goggles, benches, aprons, candles, ropes, wheels, folders,
cushions, vases, kettles, rakes, scarves, drawers, signs, trolleys, pans, hooks, markers
""")

CITIES = entries("""
London, Paris, New York, Boston, Oxford, San Diego, Chicago, Rome, Cambridge, New Delhi,
Los Angeles, Fort Worth, Washington, Green Bay, Tel Aviv, El Paso, New Orleans, San Jose,
Grand Rapids, Lincoln, Little Rock, Long Beach, San Francisco, Salt Lake City, Jackson, Red Deer,
St Louis, Madison, San Antonio, White Plains, Port Louis, Great Falls, St Andrews, Park City,
Lake Placid, Newton, Ann Arbor, Reading, Des Moines, Rock Hill, Hot Springs, Split, Stone Mountain,
High Wycombe, Fall River, High Point, Forest Hills, Union City, Iron Mountain, Bay City,
College Station, Round Rock, Battle Creek, Central City, Gold Coast, Port Arthur, Wood Green,
Big Bear, Great Barrington, Rock Springs
""")

MONTHS = """
January February March April May June July August September October November December
""".split()

NUMBER_WORDS = """
two three four five six seven eight nine ten eleven twelve
""".split()

TEMPLATES = (
    "Hi, {name} here. Please send {qty} {item} to {city} by {date}.",
    "{name} would like {qty} {item} delivered to {city} on {date}.",
    "Order for {name}: {qty} {item}, to arrive in {city} on {date}.",
    "Could you ship {qty} {item} to our {city} office before {date}? Thanks, {name}.",
    "We need {qty} {item} in {city} by {date}. Contact person is {name}.",
    "My name is {name} and I want to order {qty} {item} for {date}, delivery to {city}.",
    "By {date} {name} must have {qty} {item} at the shop in {city}.",
    "For the {city} branch: {qty} {item}, due {date}, signed for by {name}.",
    "Please deliver {qty} {item} to {name} in {city} on {date}.",
    "On {date} we open in {city} and need {qty} {item}. Regards, {name}.",
    "{name} from {city} just called and wants {qty} {item} by {date}.",
    "{name} asked for {qty} {item}. Send them to {city}, no later than {date}.",
    "Hello, this is {name} in {city}. I would like {qty} {item} please, for {date}.",
    "Can I get {qty} {item} sent to {city}? I need them on {date}. {name}.",
    "New order, {date}, {city}: {qty} {item} for {name}.",
    "I am writing to order {qty} {item}. They should reach {city} by {date}. Yours, {name}.",
    "{qty} {item} to {city} please, {date} at the latest. Best wishes, {name}.",
    "Deliver to {city} on {date}: {qty} {item}. Customer: {name}.",
    "Our {city} warehouse is out of stock, so {name} needs {qty} {item} on {date}.",
    "{name} is moving to {city} and has ordered {qty} {item} for {date}.",
    "The customer, {name}, expects {qty} {item} on {date} in {city}.",
    "In {city} they are waiting for {qty} {item}. Ask for {name} when you deliver on {date}.",
    "Please book {qty} {item} for {name}, to be dropped off in {city} on {date}.",
    "Just spoke with {name}. It is {qty} {item} for {city}, and {date} works fine.",
    # The held-out rows with odd numbers use these; `templates` keeps them out of training.
    "Would {date} be fine for bringing {qty} {item} to {city}? It is for {name}.",
    "{name} wrote: we are short of {qty} {item} in {city}, please help before {date}.",
    "Send {name} {qty} {item}. Address is in {city} and the day is {date}.",
    "Note for the driver: {city}, {date}, {qty} {item}, hand over to {name}.",
    "As agreed, {qty} {item} go out to {city} for {name} and must be there on {date}.",
    "Hello team, put {name} down for {qty} {item} on {date}. Destination {city}.",
)
N_HELD_OUT_TEMPLATES = 6

# Details that belong to nothing in the record; the model has to leave them out.
DISTRACTORS = (
    "Leave it with {name} if nobody is in.",
    "The invoice goes to {name}.",
    "We no longer need the {item}.",
    "The last order had {qty} {item} too many.",
    "There are still {qty} {item} in stock.",
    "PO {number}.",
    "The next van to {city} is full.",
    "The budget is {number} dollars.",
    "Last time the parcel went to {city} by mistake.",
    "My colleague {name} will pay.",
    "Call 555 {number} if there is a problem.",
    "Please use the back door.",
)

OPENERS = ("", "", "", "Good morning.", "Hello!", "Quick one:", "Urgent!", "Dear team,")
TYPOS = {
    "please": "plese", "deliver": "delivr", "order": "oder", "would": "woud", "need": "ned",
    "before": "befor", "arrive": "arive", "customer": "custmer", "delivery": "delivry",
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What a row is about; `json.dumps` of it is the answer."""

    name: str
    item: str
    qty: int
    city: str
    date: str

    def answer(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True)
class Words:
    """The word lists that one kind of row may draw from."""

    first_names: Sequence[str]
    surnames: Sequence[str]
    kinds: Sequence[str]
    things: Sequence[str]
    cities: Sequence[str]
    dates: Sequence[str]
    distractors: Sequence[str]


def words(held_out: bool) -> Words:
    """The words of the held-out rows or of the training rows; the two share none."""

    def share(pool: Sequence[str]) -> list[str]:
        return [word for i, word in enumerate(pool) if (i % HOLD_OUT_EVERY == 0) == held_out]

    pools = (FIRST_NAMES, SURNAMES, KINDS, THINGS, CITIES, list(calendar()), DISTRACTORS)
    return Words(*(share(pool) for pool in pools))


def templates(held_out: bool) -> Sequence[str]:
    return TEMPLATES[-N_HELD_OUT_TEMPLATES:] if held_out else TEMPLATES[:-N_HELD_OUT_TEMPLATES]


def calendar() -> Iterator[str]:
    """Every day of a leap year, as "1 Jan"."""
    day = date(2024, 1, 1)
    while day.year == 2024:
        yield f"{day.day} {MONTHS[day.month - 1][:3]}"
        day += timedelta(days=1)


def pick(rng: Random, pool: Sequence[str]) -> str:
    return pool[int(rng.random() * len(pool))]


def make_order(rng: Random, w: Words) -> Order:
    name = f"{pick(rng, w.first_names)} {pick(rng, w.surnames)}"
    qty = 2 + int(rng.random() ** 2 * 59)  # small quantities are the common ones
    item = f"{pick(rng, w.kinds)} {pick(rng, w.things)}"
    return Order(name, item, qty, pick(rng, w.cities), pick(rng, w.dates))


def say_date(rng: Random, day_month: str) -> str:
    """One of the ways in which people write a date such as "4 Mar"."""
    day, short = day_month.split()
    month = next(name for name in MONTHS if name.startswith(short))
    nth = day + ordinal_suffix(int(day))
    ways = (f"{day} {month}", f"{month} {day}", f"{month} {nth}", f"the {nth} of {month}",
            f"{day} {short}", f"{short} {day}")  # fmt: skip
    return pick(rng, ways)


def ordinal_suffix(n: int) -> str:
    return "th" if n in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")


def say_qty(rng: Random, qty: int) -> str:
    """The quantity in digits or, half of the time if it is small, in words."""
    spelled = qty - 2 < len(NUMBER_WORDS) and rng.random() < 0.5
    return NUMBER_WORDS[qty - 2] if spelled else str(qty)


def fill(rng: Random, template: str, order: Order) -> str:
    number = str(1000 + int(rng.random() * 9000))
    return template.format(
        name=order.name, item=order.item, city=order.city, number=number,
        qty=say_qty(rng, order.qty), date=say_date(rng, order.date),
    )  # fmt: skip


def add_noise(rng: Random, template: str) -> str:
    """Misspell one word of a template now and then, as people do; the slots stay as they are."""
    known = [word for word in TYPOS if re.search(rf"\b{word}\b", template)]
    if not known or rng.random() < 0.7:
        return template
    word = pick(rng, known)
    return re.sub(rf"\b{word}\b", TYPOS[word], template, count=1)


def write_sentence(rng: Random, w: Words, template: str, order: Order) -> str:
    """The order in English: an opener, the order itself, and up to two details to be ignored."""
    parts = [pick(rng, OPENERS), fill(rng, add_noise(rng, template), order)]
    for _ in range(int(rng.random() * 3)):
        # A distractor never repeats a value of the order itself.
        parts.append(fill(rng, pick(rng, w.distractors), different_order(rng, w, order)))
    return " ".join(part for part in parts if part)


def different_order(rng: Random, w: Words, order: Order) -> Order:
    while True:
        other = make_order(rng, w)
        if not set(asdict(other).values()) & set(asdict(order).values()):
            return other


def make_rows(n: int, held_out: bool, seed: int) -> list[dict[str, object]]:
    """`n` different rows in the `messages` format."""
    rng, w = Random(2 * seed + held_out), words(held_out)
    sentences: dict[str, Order] = {}
    while len(sentences) < n:
        new_phrasing = held_out and len(sentences) % 2 == 1
        order = make_order(rng, w)
        sentences[write_sentence(rng, w, pick(rng, templates(new_phrasing)), order)] = order
    return [to_row(sentence, order) for sentence, order in sentences.items()]


def to_row(sentence: str, order: Order) -> dict[str, object]:
    turns = {"user": sentence, "assistant": order.answer()}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write to a neighbouring file first, so that `path` is either whole or untouched."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_bytes(text.encode())
    unfinished.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=500, help="number of training rows")
    parser.add_argument("--eval", type=int, default=50, help="number of held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write_jsonl(args.out / "train.jsonl", make_rows(args.train, False, args.seed))
    write_jsonl(args.out / "eval.jsonl", make_rows(args.eval, True, args.seed))


if __name__ == "__main__":
    main()
