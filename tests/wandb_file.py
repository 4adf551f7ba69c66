"""Records of a W&B file (.wandb): LevelDB's log format in blocks of 32 KiB, a Protocol Buffers message in each."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def messages(path: Path) -> Iterator[bytes]:
    """The messages of a file, put together from their parts."""
    content, at, whole = path.read_bytes(), FILE_HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block that no header fits into
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def read_wandb(path: Path) -> dict[str, Any]:
    """{"id", "name", "group", "exit": code or None, "history": {key: values as JSON text, in order}}."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"exit": None, "history": {}}
    for message in messages(path):
        record = Record.FromString(message)
        if record.WhichOneof("record_type") == "run":
            run = record.run
            found |= {"id": run.run_id, "name": run.display_name, "group": run.run_group}
        elif record.WhichOneof("record_type") == "exit":
            found["exit"] = record.exit.exit_code
        for item in record.history.item:
            found["history"].setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    return found
