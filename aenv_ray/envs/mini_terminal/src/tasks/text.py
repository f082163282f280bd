"""Tasks about lines, words and columns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tasks.base import Task, expect, expect_files, expect_lines, put, read_bytes, rng

WORDS = [
    *("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "inlet", "jetty"),
    *("knoll", "lagoon", "meadow", "north", "orchard", "prairie", "quarry", "ridge", "stone"),
    *("tundra", "upland", "valley", "willow", "yonder", "zephyr"),
]


def _notes() -> list[str]:
    random = rng("count-lines-01")
    forms = ["error", "ERROR:", "Error", "errors", "terror", "error_code", "(error)", "fine"]
    return [
        f"{random.choice(WORDS)} {random.choice(forms)} {random.choice(WORDS)}" for _ in range(400)
    ]


def _check_count_lines(root: Path) -> None:
    count = sum(bool(re.search(r"\berror\b", line, re.IGNORECASE)) for line in _notes())
    expect_lines(root / "answer.txt", [str(count)])


def _book() -> str:
    random = rng("top-words-02")
    pieces = []
    for _ in range(1500):
        word = WORDS[min(int(random.expovariate(0.22)), len(WORDS) - 1)]
        word = random.choice([word, word, word.capitalize(), word.upper()])
        pieces.append(word + random.choice([" ", " ", ", ", ".\n", "\n", "--", "; "]))
    return "".join(pieces) + "\n"


def _check_top_words(root: Path) -> None:
    counts = Counter(word.lower() for word in re.findall("[A-Za-z]+", _book()))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    expect_lines(root / "top.txt", [f"{word} {count}" for word, count in ranked[:5]])


def _numbers() -> list[int]:
    random = rng("sort-numbers-03")
    return [random.randint(-1200, 1200) for _ in range(900)]


def _check_sort_numbers(root: Path) -> None:
    expect_lines(root / "sorted.txt", [str(n) for n in sorted(set(_numbers()), reverse=True)])


def _accounts() -> tuple[dict[int, str], list[tuple[int, int]]]:
    random = rng("join-tables-04")
    users = {100 + i: name for i, name in enumerate(random.sample(WORDS, 18))}
    buyers = random.sample(sorted(users), 13)
    return users, [(random.choice(buyers), random.randint(1, 40)) for _ in range(120)]


def _set_join_tables(root: Path) -> None:
    users, orders = _accounts()
    put(root / "users.txt", "".join(f"{key} {name}\n" for key, name in users.items()))
    put(root / "orders.txt", "".join(f"{key} {amount}\n" for key, amount in orders))


def _check_join_tables(root: Path) -> None:
    users, orders = _accounts()
    totals = Counter(dict.fromkeys(users.values(), 0))
    for key, amount in orders:
        totals[users[key]] += amount
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    expect_lines(root / "report.txt", [f"{name} {total}" for name, total in ranked])


def _table() -> list[list[str]]:
    random = rng("swap-columns-05")
    rows = [["id", "first name", "last name", "note"]]
    for number in range(60):
        note = random.choice(["", "two words", "x"])
        first = random.choice(["", *(f"{a} {b}" for a, b in zip(WORDS, WORDS[5:], strict=False))])
        rows.append([str(number), first, random.choice(WORDS), note])
    return rows


def _check_swap_columns(root: Path) -> None:
    expect_lines(root / "swapped.tsv", ["\t".join([a, c, b, d]) for a, b, c, d in _table()])


def _conf() -> dict[str, str]:
    random = rng("replace-host-06")
    lines = [
        "host = db.old.example",
        "url=postgres://db.old.example:5432/app",
        "# moved from db.old.example",
        "   # host = db.old.example",
        "replica = mydb.old.example",
        "zone = db.old.example.org",
        "alias = dbxold.example",
        'name = "db.old.example"  # was db.old.example',
    ]
    names = ["main.conf", "sub/app.conf", "sub/deep/x y.conf", "notes.txt"]
    return {name: "\n".join(random.sample(lines, len(lines))) + "\n" for name in names}


def _set_replace_host(root: Path) -> None:
    for name, content in _conf().items():
        put(root / "etc" / name, content)


def _check_replace_host(root: Path) -> None:
    host = re.compile(r"(?<![A-Za-z0-9.-])db\.old\.example(?![A-Za-z0-9.-])")
    expected = {}
    for name, content in _conf().items():
        lines = [
            line if line.lstrip().startswith("#") else host.sub("db.new.example", line)
            for line in content.splitlines()
        ]
        is_conf = name.endswith(".conf")
        expected[name] = ("\n".join(lines) + "\n" if is_conf else content).encode()
    expect_files(root / "etc", expected)


def _people() -> list[tuple[str, int, str]]:
    random = rng("fixed-width-07")
    return [
        (f"{random.choice(WORDS)[:5]} {random.choice('ABC')}", random.randint(1, 99999), f"d{i}")
        for i in range(50)
    ]


def _check_fixed_width(root: Path) -> None:
    expect_lines(root / "people.txt", [f"{name};{amount}" for name, amount, _ in _people()])


def _draft() -> str:
    random = rng("blank-lines-08")
    lines = ["", "  "]
    for word in WORDS * 2:
        lines.append(f"{random.choice(['', '  '])}{word}{random.choice(['', ' ', chr(9)])}")
        lines += random.choice([[], [""], ["", " ", ""], ["\t", ""]])
    return "\n".join([*lines, "", " ", ""]) + "\n"


def _check_blank_lines(root: Path) -> None:
    lines = [line.rstrip() for line in _draft().split("\n")]
    expected = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
    expect(read_bytes(root / "clean.txt") == expected.encode(), "clean.txt is not as asked")


def _verses() -> list[str]:
    random = rng("longest-lines-09")
    lines = []
    for length in random.sample(range(20, 90), 50):
        letters = random.choice(["abcdef", "äöüßéñ", "日本語文字列"])
        lines.append("".join(random.choice(letters) for _ in range(length)))
    return lines


def _check_longest_lines(root: Path) -> None:
    ranked = sorted(enumerate(_verses(), 1), key=lambda item: -len(item[1]))[:3]
    expect_lines(root / "longest.txt", [f"{number}:{len(line)}" for number, line in ranked])


def _lists() -> tuple[list[str], list[str]]:
    random = rng("only-in-first-10")
    pool = [f"{a}-{b}" for a in WORDS for b in WORDS[:6]]
    first = [random.choice(pool) for _ in range(150)]
    return first, random.sample(pool, 70)


def _set_only_in_first(root: Path) -> None:
    first, second = _lists()
    put(root / "a.txt", "".join(f"{line}\n" for line in first))
    put(root / "b.txt", "".join(f"{line}\n" for line in second))


def _check_only_in_first(root: Path) -> None:
    first, second = _lists()
    expect_lines(root / "only.txt", [x for x in dict.fromkeys(first) if x not in set(second)])


def _anagrams() -> list[str]:
    random = rng("anagrams-11")
    words = set()
    for word in WORDS[:14]:
        for _ in range(random.randint(1, 3)):
            words.add("".join(random.sample(word, len(word))))
    return random.sample(sorted(words), len(words))


def _check_anagrams(root: Path) -> None:
    groups: dict[str, list[str]] = {}
    for word in sorted(_anagrams()):
        groups.setdefault("".join(sorted(word)), []).append(word)
    expect_lines(
        root / "groups.txt", sorted(" ".join(group) for group in groups.values() if len(group) > 1)
    )


TASKS = {
    "count-lines-01": Task(
        lambda root: put(root / "notes.txt", "\n".join(_notes()) + "\n"), _check_count_lines
    ),
    "top-words-02": Task(lambda root: put(root / "book.txt", _book()), _check_top_words),
    "sort-numbers-03": Task(
        lambda root: put(root / "numbers.txt", "".join(f"{n}\n" for n in _numbers())),
        _check_sort_numbers,
    ),
    "join-tables-04": Task(_set_join_tables, _check_join_tables),
    "swap-columns-05": Task(
        lambda root: put(root / "table.tsv", "".join("\t".join(row) + "\n" for row in _table())),
        _check_swap_columns,
    ),
    "replace-host-06": Task(_set_replace_host, _check_replace_host),
    "fixed-width-07": Task(
        lambda root: put(
            root / "people.dat", "".join(f"{n:<10}{a:>6}{d:<8}\n" for n, a, d in _people())
        ),
        _check_fixed_width,
    ),
    "blank-lines-08": Task(lambda root: put(root / "draft.txt", _draft()), _check_blank_lines),
    "longest-lines-09": Task(
        lambda root: put(root / "verses.txt", "\n".join(_verses()) + "\n"), _check_longest_lines
    ),
    "only-in-first-10": Task(_set_only_in_first, _check_only_in_first),
    "anagrams-11": Task(
        lambda root: put(root / "words.txt", "\n".join(_anagrams()) + "\n"), _check_anagrams
    ),
}
