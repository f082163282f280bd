"""Tasks about CSV, JSON and SQLite."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.base import Failed, Task, expect, expect_lines, put, read_text, rng

REGIONS = ["East, upper", "East, lower", "North", 'South "new"', "West"]
NAMES = [
    *("Ada", "Bo", "Cyd", "Dee", "Eli", "Flo", "Gus", "Hal", "Ivy", "Jo"),
    *("Kim", "Lou", "Max", "Nan", "Oz", "Pia", "Quin", "Ray", "Sue", "Ted"),
]


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _expect_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    try:
        found = [row for row in csv.reader(io.StringIO(read_text(path), newline="")) if row]
    except csv.Error as exc:
        raise Failed(f"{path.name} is not CSV: {exc}") from None
    expect(len(found) == len(rows), f"{path.name} has {len(found)} rows, not {len(rows)}")
    for is_, should in zip(found, rows, strict=True):
        expect(is_ == list(should), f"{path.name}: the row {is_} should be {list(should)}")


def _expect_json(path: Path, value: object) -> None:
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as exc:
        raise Failed(f"{path.name} is not JSON: {exc}") from None
    expect(found == value, f"{path.name} is not the value asked for")


def _sales() -> list[tuple[int, str, str, int]]:
    random = rng("csv-total-12")
    return [
        (i, random.choice(REGIONS), random.choice(NAMES), random.randint(100, 99999))
        for i in range(200)
    ]


def _set_csv_total(root: Path) -> None:
    rows = [(i, region, name, f"{cents / 100:.2f}") for i, region, name, cents in _sales()]
    put(root / "sales.csv", _csv([("id", "region", "seller", "amount"), *rows]))


def _check_csv_total(root: Path) -> None:
    totals = dict.fromkeys(sorted(REGIONS), 0)
    for _, region, _, cents in _sales():
        totals[region] += cents
    rows = [(region, f"{cents / 100:.2f}") for region, cents in totals.items()]
    _expect_csv(root / "totals.csv", [("region", "total"), *rows])


def _users() -> list[dict[str, Any]]:
    random = rng("json-filter-13")
    return [
        {"name": f"{a} {b}", "age": random.randint(27, 34), "active": random.random() < 0.5}
        for a in NAMES
        for b in NAMES[:4]
    ]


def _check_json_filter(root: Path) -> None:
    names = [user["name"] for user in _users() if user["active"] and user["age"] > 30]
    expect_lines(root / "names.txt", sorted(names))


def _events() -> list[dict[str, Any]]:
    random = rng("json-to-csv-14")
    texts = ["plain", "with, comma", 'with "quotes"', "two\nlines", "ünïcode", ""]
    return [
        {
            "id": i,
            "user": {"name": random.choice(NAMES), "tags": random.sample(NAMES, 2)},
            "text": random.choice(texts),
        }
        for i in range(40)
    ]


def _check_json_to_csv(root: Path) -> None:
    rows = [
        (str(e["id"]), e["user"]["name"], "|".join(e["user"]["tags"]), e["text"]) for e in _events()
    ]
    _expect_csv(root / "events.csv", [("id", "name", "tags", "text"), *rows])


def _contacts() -> list[tuple[str, str, str]]:
    random = rng("csv-dedup-15")
    rows = []
    days = random.sample(range(1, 336), 120)
    for day in days:
        name = random.choice(NAMES)
        mail = random.choice([name, name.lower(), name.upper()]) + "@example.org"
        date = f"2024-{1 + day // 28:02}-{1 + day % 28:02}"
        rows.append((mail, str(random.randint(10000, 99999)), date))
    return rows


def _check_csv_dedup(root: Path) -> None:
    latest: dict[str, tuple[str, str, str]] = {}
    for mail, phone, date in _contacts():
        known = latest.get(mail.lower())
        if known is None or date > known[2]:
            latest[mail.lower()] = (mail.lower(), phone, date)
    rows = [latest[mail] for mail in sorted(latest)]
    _expect_csv(root / "contacts-clean.csv", [("email", "phone", "updated"), *rows])


def _shop() -> tuple[list[tuple[int, str]], list[tuple[int, int, str]]]:
    random = rng("sqlite-report-16")
    customers = list(enumerate(NAMES, 1))
    years = {key: random.choice([["2022"], ["2023"], ["2022", "2023"], []]) for key, _ in customers}
    orders = [
        (number, key, f"{random.choice(years[key])}-0{random.randint(1, 9)}-11")
        for number, key in enumerate(random.choices([k for k in years if years[k]], k=90))
    ]
    return customers, orders


def _set_sqlite_report(root: Path) -> None:
    customers, orders = _shop()
    with closing(sqlite3.connect(root / "shop.db")) as database, database:
        database.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("CREATE TABLE orders (id INTEGER, customer_id INTEGER, day TEXT)")
        database.executemany("INSERT INTO customers VALUES (?, ?)", customers)
        database.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)


def _check_sqlite_report(root: Path) -> None:
    customers, orders = _shop()
    bought = {key for _, key, day in orders if day.startswith("2023")}
    expect_lines(
        root / "inactive.txt", sorted(name for key, name in customers if key not in bought)
    )


def _books() -> list[tuple[int, str, int]]:
    random = rng("sqlite-import-17")
    titles = [f"The {a}, the {b}" for a in NAMES[:8] for b in NAMES[8:12]]
    return [(i, title, random.randint(1800, 2024)) for i, title in enumerate(titles, 1)]


def _check_sqlite_import(root: Path) -> None:
    path = root / "library.db"
    expect(path.is_file(), "library.db is missing")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)) as database:
            columns = database.execute("SELECT name, type, pk FROM pragma_table_info('books')")
            found = [(name, kind.upper(), key) for name, kind, key in columns]
            rows = database.execute("SELECT id, title, year FROM books ORDER BY id").fetchmany(999)
    except sqlite3.Error as exc:
        raise Failed(f"library.db: {exc}") from None
    expected = [("id", "INTEGER", 1), ("title", "TEXT", 0), ("year", "INTEGER", 0)]
    expect(found == expected, f"the columns of books are {found}")
    expect(rows == _books(), "the rows of books are not those of books.csv")


BASE = {
    "server": {"host": "0.0.0.0", "port": 80, "tls": {"on": False, "cert": "a.pem"}},
    "log": {"level": "info", "file": "/var/log/app.log"},
    "plugins": ["auth", "cache"],
    "debug": True,
}
OVERRIDE = {
    "server": {"port": 8443, "tls": {"on": True}},
    "log": {"file": None},
    "plugins": ["metrics"],
    "debug": None,
    "region": {"name": "eu"},
}


def _set_json_merge(root: Path) -> None:
    put(root / "base.json", json.dumps(BASE, indent=2))
    put(root / "override.json", json.dumps(OVERRIDE, indent=2))


def _check_json_merge(root: Path) -> None:
    merged = {
        "server": {"host": "0.0.0.0", "port": 8443, "tls": {"on": True, "cert": "a.pem"}},
        "log": {"level": "info"},
        "plugins": ["metrics"],
        "region": {"name": "eu"},
    }
    _expect_json(root / "merged.json", merged)


def _readings() -> list[tuple[str, str, int]]:
    random = rng("csv-pivot-19")
    cells = [(f"2024-05-{day:02}", s) for day in range(1, 13) for s in ("oak", "elm", "fir", "ash")]
    return [
        (day, site, random.randint(1, 50)) for day, site in random.sample(cells, 33) for _ in "ab"
    ]


def _check_csv_pivot(root: Path) -> None:
    readings = _readings()
    sites = sorted({site for _, site, _ in readings})
    sums: dict[tuple[str, str], int] = {}
    for day, site, value in readings:
        sums[day, site] = sums.get((day, site), 0) + value
    rows = [
        [day, *(str(sums.get((day, site), 0)) for site in sites)]
        for day in sorted({day for day, _, _ in readings})
    ]
    _expect_csv(root / "wide.csv", [["day", *sites], *rows])


TASKS = {
    "csv-total-12": Task(_set_csv_total, _check_csv_total),
    "json-filter-13": Task(
        lambda root: put(root / "users.json", json.dumps(_users(), indent=1)), _check_json_filter
    ),
    "json-to-csv-14": Task(
        lambda root: put(root / "events.json", json.dumps(_events())), _check_json_to_csv
    ),
    "csv-dedup-15": Task(
        lambda root: put(
            root / "contacts.csv", _csv([("email", "phone", "updated"), *_contacts()])
        ),
        _check_csv_dedup,
    ),
    "sqlite-report-16": Task(_set_sqlite_report, _check_sqlite_report),
    "sqlite-import-17": Task(
        lambda root: put(root / "books.csv", _csv([("id", "title", "year"), *_books()])),
        _check_sqlite_import,
    ),
    "json-merge-18": Task(_set_json_merge, _check_json_merge),
    "csv-pivot-19": Task(
        lambda root: put(root / "long.csv", _csv([("day", "site", "value"), *_readings()])),
        _check_csv_pivot,
    ),
}
