"""The command `export`: a model as a folder for transformers, and on the Hugging Face Hub."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from insertlm.core.errors import InsertlmError

__all__ = ["export"]


def export(args: Namespace) -> None:
    if args.folder is None and args.push is None:
        raise InsertlmError("expected a FOLDER to write, or --push OWNER/NAME")
    if args.private and args.push is None:
        raise InsertlmError("--private: expected --push OWNER/NAME")
    from insertlm.model import load
    from insertlm.release.folder import check_place
    from insertlm.release.folder import export as write
    from insertlm.storage.hub import push

    # Before the model is loaded, or fetched from the Hub.
    if args.folder is not None:
        check_place(args.folder.resolve())
    model = load(args.model, "cpu", halved=False, checkpoint=args.checkpoint)  # else weights would be rounded
    with TemporaryDirectory(prefix="insertlm-") as scratch:
        folder = args.folder or Path(scratch) / "export"
        write(model, folder, args.push)
        if args.folder is not None:
            print(f"wrote {folder}; in Python: AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)")
        if args.push is not None:
            print(f"pushed to {push(folder, args.push, args.private)}")
