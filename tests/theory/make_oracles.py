"""Writes oracles.json in ball arithmetic at doubled precision: python -m tests.theory.make_oracles."""

import json
from pathlib import Path

from tests.theory.reference import free_risks, power_law

CASES = ((64, 2, 0.5, (2, 4, 8, 10, 20, 32)), (128, 1, 2, (1, 8, 40)), (512, 0.5, 1, (3, 20)))


def main() -> None:
    entries = []
    for dim, a, b, depths in CASES:
        risks = free_risks(power_law(a, dim), power_law(b, dim), max(depths))
        entries += [{"dim": dim, "a": a, "b": b, "depth": n, "value": risks[n]} for n in depths]
    path = Path(__file__).parent / "oracles.json"
    path.write_text(json.dumps({"made_by": "tests/theory/make_oracles.py", "free_risk": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
