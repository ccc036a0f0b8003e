"""``gpuherd merge``: merges a LoRA adapter into its base model and writes the result to disk."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, print_json, progress_bar, progress_of
from gpuherd.errors import BadModel, ExitCode, MissingModel, UsageError, naming_extras, printable
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.models.lora.merge import MergeResult
    from gpuherd.models.names import ModelRef

MERGE = """\
Merges a LoRA adapter into its base model and writes the result: W + s B A, rsLoRA, DoRA, modules saved whole, biases.
The weights equal those of PEFT's merge_and_unload bit for bit, for less than half the CPU time and memory. Config and
tokenizer are copied. An interrupted merge continues if the same command is given again.

examples:
  gpuherd merge org/adapter --output-dir merged
  gpuherd merge ./adapter --base-model meta-llama/Llama-3.1-8B --output-dir merged --dtype bf16
  gpuherd merge ./adapter --output-dir merged --dry-run --json
"""
_FORMATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_SHORT = {short: name for name, short in _FORMATS.items()} | {"F64": "fp64"}
_GB = 1 << 30


def add_merge(parser: Parser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="the adapter: a folder, or a Hugging Face id")
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="folder for the result; must be empty or not exist yet"
    )
    parser.add_argument("--base-model", metavar="MODEL", help="base model (default: the one that its config names)")
    parser.add_argument(
        "--dtype", choices=tuple(_FORMATS), help="data type of the weights (default: the one the base is loaded in)"
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", help="largest weight file, like 5GB (default: files split like the base's)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check both and show what would be written; write nothing"
    )
    add_json(parser, "the result")


def run_merge(args: argparse.Namespace) -> int:
    """Merges, or shows what a merge would write."""
    with naming_extras(dict.fromkeys(("numpy", "huggingface_hub", "torch"), "load"), "merging needs"):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.lora.adapter import adapter_base, check_adapter, is_adapter
    from gpuherd.models.names import parse_model, quoted

    shard_bytes = _shard_bytes(args.shard_size)
    output = _output(args.output_dir)
    adapter = locate(parse_model(args.adapter), for_loading=True)
    if not is_adapter(adapter):
        raise BadModel(f"{quoted(args.adapter)} is no adapter: it has no adapter_config.json, or whole model weights")
    adapter = adapter if adapter.is_dir() else adapter.parent
    base = args.base_model or adapter_base(adapter)
    if not base:
        raise UsageError(f"{quoted(args.adapter)} names no base model; give it by --base-model")
    check_adapter(adapter)  # before its base is downloaded
    dtype = None if args.dtype is None else _FORMATS[args.dtype]
    if args.dry_run:
        with _naming_source(args):
            ref = parse_model(base)
        result = _dry_run(ref, adapter, output, dtype, shard_bytes)
    else:
        from gpuherd.models.lora.merge import merge_to_folder, need_torch

        need_torch()
        with _naming_source(args):
            path = locate(parse_model(base), for_loading=True, with_code=True)
        with progress_bar(in_bytes=True) as bar:
            result = merge_to_folder(
                path, adapter, output,
                shard_bytes=shard_bytes, dtype=dtype, names=(base, args.adapter),
                on_progress=progress_of(bar, "merging"),
            )  # fmt: skip
    if args.json:
        print_json(_record(result, base, args))
    else:
        for line in _lines(result, base, args):
            print(printable(line))
    return ExitCode.OK


def _output(word: str) -> Path:
    """The folder for the result. Raises UsageError if it can't be used."""
    from gpuherd.models.lora.merge import final_folder

    if not word.strip():
        raise UsageError("--output-dir is empty; name a folder")
    try:
        return final_folder(Path(word).expanduser())
    except RuntimeError as problem:  # no such user for ~user
        raise UsageError(f"--output-dir {word!r}: {problem}") from None


def _shard_bytes(word: str | None) -> int | None:
    from gpuherd.units import size_mb

    if word is None:
        return None
    try:
        return size_mb(word) << 20
    except ValueError as problem:
        raise UsageError(f"--shard-size: {problem}") from None


@contextmanager
def _naming_source(args: argparse.Namespace) -> Iterator[None]:
    """Adds to an error about the base model where its name is from, if the user did not give it."""
    try:
        yield
    except BadModel as problem:
        if args.base_model:
            raise
        raise type(problem)(f"{problem} (the adapter names this base; --base-model gives another)") from None


def _dry_run(ref: ModelRef, adapter: Path, output: Path, dtype: str | None, shard_bytes: int | None) -> MergeResult:
    """What a merge would write. For a base that is not on this machine, only headers are downloaded."""
    from gpuherd.models.checkpoints.hub import cached_copy
    from gpuherd.models.checkpoints.hub_headers import read_remote
    from gpuherd.models.lora.merge import already_there, check_disk_space, prepare_merge, prepare_merge_of_headers

    path = ref.path or cached_copy(ref)
    if path is not None:
        try:
            todo = prepare_merge(path, adapter, shard_bytes=shard_bytes, dtype=dtype)
        except MissingModel:
            if ref.path is not None:
                raise
            # An interrupted download, which the merge would continue.
        else:
            result = todo.result(output, was_there=already_there(output, todo.fingerprint))
            check_disk_space(0 if result.was_there else result.plan.nbytes, output)
            return result
    remote = read_remote(ref)
    result = prepare_merge_of_headers(
        remote.config, remote.tensors, adapter, output, dtype=dtype, shard_bytes=shard_bytes
    )
    check_disk_space(result.plan.nbytes, output)
    return result


def _record(result: MergeResult, base: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "adapter": args.adapter,
        "base_model": base,
        "output_dir": str(result.output),
        "dry_run": bool(args.dry_run),
        "was_there": result.was_there,
        "dtype": _SHORT[result.plan.dtype],
        "tensors": len(result.plan.tensors),
        "changed": result.plan.changed,
        "params": result.plan.params,
        "bytes": result.plan.nbytes,
        "bytes_kept_of_an_earlier_try": result.kept_bytes,
        "files": list(result.files),
    }


def _lines(result: MergeResult, base: str, args: argparse.Namespace) -> Iterator[str]:
    done = "would be merged" if args.dry_run and not result.was_there else "is merged"
    yield f"{args.adapter} {done} into {base}: {result.output}" + (" (was there already)" if result.was_there else "")
    plan = result.plan
    files = {0: "as many files as the base has", 1: "one file"}.get(len(result.files), f"{len(result.files)} files")
    yield (
        f"{len(plan.changed)} of {len(plan.tensors)} tensors changed, {plan.params:,} parameters in "
        f"{_SHORT[plan.dtype]}, {plan.nbytes / _GB:.1f} GiB in {files}"
    )
    if result.kept_bytes:
        yield f"{result.kept_bytes / _GB:.1f} GiB were there from an earlier try"
    if not args.dry_run:
        yield f"next: gpuherd plan {shlex.quote(str(result.output))}"
