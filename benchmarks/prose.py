"""Plain English out of Debian's documentation packages, for `hirank bench pretrain` to learn from.

    apt-get download debian-handbook perl-doc postgresql-doc-15 python3.11-doc git-doc ...
    python benchmarks/prose.py *.deb --out prose.txt

Paragraphs of HTML pages and of Perl's pod that read like prose: no listings, tables or menus, no
other languages, none twice. Runs of twelve paragraphs are shuffled over all packages, so that the
end of the file, which is held out, is like the rest. The same packages give the same bytes.
`prose.txt.packages` names them, with their versions and what each gave.
"""

import argparse
import hashlib
import html
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

RUN, SHORTEST, LONGEST = 12, 120, 4000
OTHER_LANGUAGES = re.compile(r"/(translations|html/(?!en-US)[a-z]{2}-[A-Z]{2})/")
DROPPED = re.compile(
    r"<(script|style|pre|nav|head|table|h[1-6]|footer|button)\b.*?</\1\s*>", re.S | re.I
)
BLOCK = re.compile(
    r"</?(p|div|li|dd|dt|ul|ol|dl|section|article|body|blockquote|br|hr)\b[^>]*>", re.I
)
TAG, SPACE = re.compile(r"<[^>]*>"), re.compile(r"\s+")
POD = re.compile(r"[A-Z]<+ ?([^<>]*?) ?>+")
PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2026", "''\"\"--.")
COMMON = frozenset(
    "the a an of to in and or is are be that this it for with as on by if not can will you from "
    "which when have has was at but may any all one its used use".split()
)


def main() -> None:
    """Write the text and the list of what it is made of."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", type=Path, help="Debian packages of documentation")
    parser.add_argument("--out", type=Path, required=True, help="the text")
    given = parser.parse_args()
    packages = sorted(given.packages, key=lambda path: path.name)
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(paragraphs_of, packages))
    seen: set[bytes] = set()
    runs, counts = [], []
    for paragraphs in found:
        new = [one for one in paragraphs if is_new(one, seen)]
        runs += [new[start : start + RUN] for start in range(0, len(new), RUN)]
        counts.append(sum(len(one) + 1 for one in new))
    random.Random(0).shuffle(runs)
    given.out.write_text("".join(f"{one}\n" for run in runs for one in run), encoding="utf-8")
    listed = [f"{path.name}: {n:,} bytes" for path, n in zip(packages, counts, strict=True)]
    Path(f"{given.out}.packages").write_text("\n".join(listed) + "\n", encoding="utf-8")
    print(*listed, f"{given.out}: {sum(counts):,} bytes", sep="\n")


def is_new(paragraph: str, seen: set[bytes]) -> bool:
    """Told by its letters alone: the same sentence with another number in it is not new."""
    key = hashlib.sha1(re.sub(r"[^a-z]", "", paragraph.lower()).encode()).digest()
    if key in seen:
        return False
    seen.add(key)
    return True


def paragraphs_of(package: Path) -> list[str]:
    """In the order of the files' names."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return [one for path in files for one in read(path) if is_prose(one)]


def read(path: Path) -> Iterator[str]:
    """The paragraphs of an HTML page or of a pod; nothing of another file."""
    if path.suffix not in (".html", ".pod") or OTHER_LANGUAGES.search(str(path)):
        return
    text = path.read_text(encoding="utf-8", errors="ignore")
    parts = from_html(text) if path.suffix == ".html" else from_pod(text)
    for part in parts:
        yield SPACE.sub(" ", part.translate(PLAIN)).strip()


def from_html(text: str) -> list[str]:
    """Between the tags that begin or end a block."""
    blocks = BLOCK.sub("\0", DROPPED.sub("\0", text)).split("\0")
    return [html.unescape(TAG.sub("", block)) for block in blocks]


def from_pod(text: str) -> list[str]:
    """Without headings and listings, markup taken off from the inside out."""
    parts = [part for part in re.split(r"\n\s*\n", text) if not part.startswith((" ", "\t", "="))]
    for _ in range(3):
        parts = [POD.sub(r"\1", part) for part in parts]
    return parts


def is_prose(paragraph: str) -> bool:
    """Ends like a sentence, is mostly letters, and has the small words of English."""
    if not SHORTEST <= len(paragraph) <= LONGEST or paragraph[-1] not in ".!?:)":
        return False
    if "Copyright" in paragraph or not paragraph.isascii():
        return False
    letters = sum(one.isalpha() or one in " ,.'" for one in paragraph)
    words = [word.strip(".,:;()'\"") for word in paragraph.lower().split()]
    return letters >= 0.9 * len(paragraph) and sum(w in COMMON for w in words) >= 0.25 * len(words)


if __name__ == "__main__":
    main()
