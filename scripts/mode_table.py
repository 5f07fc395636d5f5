"""Prints the mode × option table of docs/modes.md, from the code that refuses options: python scripts/mode_table.py."""

from __future__ import annotations

from hvdvars.options import MODES, OPTION_TABLE, RULES


def table() -> str:
    """Markdown: one row per option, one column per mode, footnotes for the reasons of refusal."""
    reasons: list[str] = []
    header = " | ".join(f"`{mode}`" for mode in MODES)
    rows = [f"| option | what it does | {header} |", "| --- " * (len(MODES) + 2) + "|"]
    for option, per_mode in OPTION_TABLE.items():
        cells = []
        for mode in MODES:
            reason = per_mode[mode]
            if reason is None:
                cells.append("yes")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})")
        rows.append(f"| `{option}` | {RULES[option].help} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*rows, "", "Refused at `create`, because:", "", *notes])


if __name__ == "__main__":
    print(table())
