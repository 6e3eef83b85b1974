"""Make a network of the package from a finished run: round its weights, certify and attack them, pack the files.

    python benchmarks/take_home.py RUN NAME [--bits 8] [--root DATA]

writes src/lipkit/networks/NAME (see `lipkit.networks`). The figures of its record are those of the rounded network.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from pathlib import Path

from papers.table_runs import without_places

from lipkit import modules, networks
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import to_yaml
from lipkit.interop import model_card
from lipkit.report import Record, read_record

LOAD = """```python
import lipkit

network = lipkit.load("{name}")
```"""


def main() -> None:
    """Pack one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--bits", type=int, choices=(8, 16))
    parser.add_argument("--root", default=None)
    options = parser.parse_args()
    target = Path(networks.__file__).parent / options.name
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / options.name
        copy.mkdir()
        for name in ("recipe.yaml", "record.json"):
            shutil.copy(options.run / name, copy / name)
        modules.save(modules.load(options.run / "network"), copy / "network", bits=options.bits)
        recipe = pipeline.read_recipe(copy, [] if options.root is None else [f"data.root={options.root}"])
        made = pipeline.certify(copy, recipe)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(copy / "network", target / "network")
        placeless = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": None})})
        (target / "recipe.yaml").write_text(to_yaml(placeless))
        content = json.loads(without_places((made.folder / "record.json").read_bytes()))
        content["name"] = options.name  # not that of the folder in which it was certified once more
        (target / "record.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        # Without the name and the time that gzip writes: the same run gives the same bytes.
        packed = gzip.compress((made.folder / "certificate.jsonl").read_bytes(), 9, mtime=0)
        (target / "certificate.jsonl.gz").write_bytes(packed)
    record = read_record(target)
    assert isinstance(record, Record)
    (target / "README.md").write_text(model_card(record, load=LOAD.format(name=options.name)))
    print(json.dumps(made.metrics, indent=1))
    print(f"{target}: {sum(f.stat().st_size for f in target.rglob('*') if f.is_file()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
