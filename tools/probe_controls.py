"""Write the scores of the probes' controls that come with the package, from a store with finished runs.

regard probe 'SKA()' --train-controls --boards digit_boards --results STORE    # the same with --boards boards
python tools/probe_controls.py STORE
"""

import json
import sys
from pathlib import Path

from regard.lab.data.boards import NAMES, PROBED
from regard.lab.results.results import Results
from regard.lab.studies.probes.profile import CONTROLS_FILE
from regard.lab.studies.probes.run import profile_runs, scores
from regard.lab.studies.probes.study import CONTROLS, SEEDS, protocol


def main() -> None:
    """Rewrite the file; scores that the store does not have are left out."""
    store, tables = Results(Path(sys.argv[1])), {}
    for boards in NAMES:
        found = scores(profile_runs(CONTROLS, tuple(PROBED), boards, seeds=SEEDS), store)
        rounded = {
            row: {ability: [round(value, 2) for value in values] for ability, values in parts.items()}
            for row, parts in found.items()
        }
        tables[boards] = {"protocol": protocol(boards), "scores": rounded}
    CONTROLS_FILE.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
