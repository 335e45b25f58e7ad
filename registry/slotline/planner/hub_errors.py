"""Errors of the Hugging Face Hub as errors of slotline, each with what to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from slotline.registry.errors import CapacityError, ModelError, SlotlineError
from slotline.registry.loading import one_line
from slotline.registry.named_path import hub_cache

_TOKEN = "set HF_TOKEN to a token of https://huggingface.co/settings/tokens, or run `hf auth login`"


def as_model_error(error: Exception, repo: str, revision: str, endpoint: str, api: Any) -> SlotlineError:
    """Return the error for what the Hub's client raised."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"model = {repo!r} is gated on {endpoint}, and this token, if any, has not accepted its terms",
            fix=f"accept the terms at {endpoint}/{repo}, then {_TOKEN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(
            f"model = {repo!r} has no revision {revision!r} on {endpoint}", fix=f"name one of {_revisions(api, repo)}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"there is no model {repo!r} on {endpoint}, or it is private and this token may not read it",
            fix=f"correct the name; for a private model, {_TOKEN}",
        )
    return _of_http(error, repo, endpoint) or _of_disk(error, repo, endpoint)


def _of_http(error: Exception, repo: str, endpoint: str) -> ModelError | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelError(f"{endpoint} refuses access to {repo!r} with this token (status {status})", fix=_TOKEN)
    if status == 429:
        return ModelError(f"{endpoint} limits the rate of requests (status 429)", fix=f"wait a minute, or {_TOKEN}")
    if status is not None:
        return ModelError(
            f"{endpoint} answers status {status} for {repo!r}: {one_line(error)}",
            fix="try again later, or use a mirror",
        )
    return None


def _of_disk(error: Exception, repo: str, endpoint: str) -> SlotlineError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"the disk of {hub_cache()} is full: {repo!r} is not complete",
            fix="free some space (`hf cache ls`, `hf cache rm`), or set HF_HOME to a folder on a larger disk",
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ModelError(
            f"{hub_cache()} cannot be written: {one_line(error)}", fix="set HF_HOME to a folder that can be written"
        )
    return ModelError(
        f"{repo!r} cannot be downloaded from {endpoint}: {one_line(error)}",
        fix="run the command again: what arrived is kept",
    )


def no_cache_error(repo: str, revision: str, why: str, missing: Sequence[str]) -> ModelError:
    """Return the error for a model that is not whole in the cache and cannot be downloaded.

    Args:
        why: why there is no download.
        missing: names of the files that the cache lacks, empty if it holds nothing of the revision.
    """
    what = f"revision {revision!r} is not in the cache {hub_cache()}"
    if missing:
        what = f"the cache {hub_cache()} lacks {len(missing)} of its files: {', '.join(missing[:4])}"
    return ModelError(
        f"model = {repo!r} is no folder: it is the name of a model on the Hugging Face Hub, {what}, and {why}",
        fix=f"where there is a network, run `hf download {repo}{_option(revision)}` and copy the cache, or "
        f"download it, for instance with `hf download {repo} --local-dir {repo.rpartition('/')[2]}`, and name "
        "that folder",
    )


def _option(revision: str) -> str:
    return "" if revision == "main" else f" --revision {revision}"


def _revisions(api: Any, repo: str) -> str:
    """Return the branches and tags of a repository, in words."""
    try:
        refs = api.list_repo_refs(repo)
    except Exception:  # only advice
        return "its branches, tags or commits"
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}, or a commit"
