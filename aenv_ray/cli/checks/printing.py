"""How ``aenv doctor``, ``aenv cluster doctor`` and ``aenv test --check`` print findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.output import Columns, Format, show_rows
from aenv_ray.findings import Finding, Verdict

_COLUMNS: Final[Columns] = {
    "CHECK": lambda c: c["name"],
    "": lambda c: c["verdict"],
    "FOUND": lambda c: c["found"],
}


def show_findings(findings: Sequence[Finding], given: Format | None) -> None:
    """Print findings on standard output, and how to fix them on standard error."""
    show_rows([asdict(finding) for finding in findings], given, _COLUMNS)
    for finding in findings:
        if finding.mend and finding.verdict is not Verdict.OK:
            console.say(f"\n{finding.name}: {finding.found}\n  {finding.mend}")
