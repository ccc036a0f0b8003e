"""Makes the descriptions that are shipped: ``python -m gpuherd.models.describe.make_descriptions [ID ...]``.

Describes the models of ``known_models.json``, those alone whose ids are given or, without any, all that have no
description yet or one without training steps, and writes each into ``descriptions.jsonl`` as soon as it is there. A
model with the layers of one that is described gets its peaks. ``--again`` measures all of them anew, which belongs to a
new version of transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuherd.errors import BadModel
from gpuherd.models.describe.cache import to_dict
from gpuherd.models.describe.known_models import SHIPPED, known_models, shipped, with_shipped_peaks
from gpuherd.models.describe.meta import add_training, describe_config

_FILE = Path(__file__).with_name(SHIPPED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Describes models, and says of each how long it took."""
    parser = argparse.ArgumentParser(prog="python -m gpuherd.models.describe.make_descriptions", description=__doc__)
    parser.add_argument("ids", nargs="*", help="models of known_models.json")
    parser.add_argument("--again", action="store_true", help="also those that have a description")
    options = parser.parse_args(arguments)
    for model in known_models():
        if options.ids and model.model_id not in options.ids:
            continue
        start = time.monotonic()
        try:
            found = None if options.again else shipped(model.model_id, model.config, model.model_id)
            if found is None:
                found = describe_config(model.config, model.model_id, peaks=False)
                if not options.again:
                    found = with_shipped_peaks(found)
                if not found.peaks:
                    found = describe_config(model.config, model.model_id)
            elif not options.ids and (found.trainings_measured or not found.predicts):
                continue
            if not found.trainings_measured and not options.again:
                found = with_shipped_peaks(found)
            if not found.trainings_measured:
                found = add_training(found, model.config)
        except BadModel as problem:
            _say(f"{model.model_id}: {problem}")
            continue
        if found.parameters != model.parameters:
            _say(f"{model.model_id}: {found.parameters} numbers, {model.parameters} were published")
            continue
        record = json.dumps(to_dict(found), separators=(",", ":"))
        _write({**_read(), model.model_id: record})
        _say(f"{model.model_id}: {time.monotonic() - start:.1f} s, {len(record)} bytes")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _read() -> dict[str, str]:
    if not _FILE.is_file():
        return {}
    lines = _FILE.read_text("utf-8").splitlines()
    return {model_id: record for model_id, _, record in (line.partition("\t") for line in lines)}


def _write(records: Mapping[str, str]) -> None:
    """In the order of ``known_models.json``."""
    known = [model.model_id for model in known_models() if model.model_id in records]
    _FILE.write_text("".join(f"{model_id}\t{records[model_id]}\n" for model_id in known), "utf-8")


if __name__ == "__main__":
    main()
