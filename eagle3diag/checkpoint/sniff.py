"""What a file is when it is not what its name says, and what to do about it.

The loader answers "header too large" to a Git LFS pointer, an HTML error page and a zip alike. The first bytes tell them apart.
"""

from __future__ import annotations

__all__ = ["is_pickle", "is_zip", "sniff"]


def is_zip(first: bytes) -> bool:
    """A zip archive, which is what ``torch.save`` writes today."""
    return first[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_pickle(first: bytes) -> bool:
    """A bare pickle of protocol 2 to 5, which is what ``torch.save`` wrote before 1.6."""
    return len(first) > 2 and first[0] == 0x80 and 2 <= first[1] <= 5


def sniff(first: bytes) -> str | None:
    """A known other kind of file, with the next step, or None.

    Args:
        first: the first bytes of the file, a few hundred are enough.
    """
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs") or text.startswith(b"version https://hawser"):
        return "a Git LFS pointer, not weights: run `git lfs pull`"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")):
        return "an HTML page, not weights (failed download?): fetch the file again, signed in if the repository asks for it"
    if text.startswith((b'{"', b"{'", b"[", b"{\n", b"{\r", b"{}", b"{ ")):
        return "JSON text, not weights (an error message saved as a file?): look inside, then fetch the file again"
    if is_zip(first):
        return "a zip archive, probably written by torch.save: name it .pt and open it again"
    if is_pickle(first) and first[2:8] != b"\0" * 6:
        return "a pickle, probably written by torch.save: name it .pt and open it again"
    if first.startswith(b"GGUF"):
        return "a GGUF file: convert it to safetensors first; GGUF drafts are not read"
    if first.startswith(b"\x1f\x8b"):
        return "a gzip archive: unpack it first (gunzip, or tar -xzf)"
    if first.startswith(b"\x89HDF"):
        return "an HDF5 file: convert it to safetensors first"
    if text.startswith(
        (
            b"access denied",
            b"entry not found",
            b"not found",
            b"repository not found",
            b"invalid credentials",
            b"unauthorized",
            b"forbidden",
            b"error",
        )
    ):
        return "an error message in place of weights (failed download?): fetch the file again"
    return None
