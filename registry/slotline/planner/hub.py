"""Models by their name on the Hugging Face Hub: from the local cache, or downloaded into it.

Only data is downloaded: configurations, tokenizers, templates and weights, never Python files. The environment is
huggingface_hub's own: `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from slotline.planner.hub_errors import as_model_error, no_cache_error
from slotline.planner.hub_files import is_small, weight_files
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import CapacityError, ModelError
from slotline.registry.json_file import read_json
from slotline.registry.named_path import hub_cache, hub_name

logger = logging.getLogger("slotline")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 10.0
"""Seconds to wait for the Hub's answer about a repository."""


@frozen(kw_only=True)
class HubModel:
    """Model of the Hub in the local cache.

    Attributes:
        repo: its name, ``org/name``.
        revision: the branch, tag or commit that was asked for.
        commit: the commit that the revision was.
        folder: its snapshot in the cache.
        missing: names of the weight files that are not in the cache, because they were not asked for.
    """

    repo: str
    revision: str
    commit: str
    folder: Path
    missing: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, str]:
        """Rows for the plan: repository, revision and commit."""
        return {"hub": self.repo, "revision": self.revision, "commit": self.commit}


def find_hub_model(loaded: LoadedConfig, *, weights: bool = True) -> HubModel | None:
    """Return the model that the configuration names on the Hub, downloaded if it is not in the cache.

    A local folder of that name wins.

    Args:
        weights: False to download no weights.

    Raises:
        ModelError: if it is neither in the cache nor available, or if `revision` is set for a local folder.
        CapacityError: if the disk has too little room.
    """
    name, path = loaded.config.model, loaded.path("model")
    repo = None if path is None or os.path.exists(path) else hub_name(name)
    if repo is None:
        if loaded.config.revision:
            raise ModelError(
                f"revision = {loaded.config.revision!r} is set, and model = {name!r} is no model of the Hub",
                fix="remove `revision`, or name a model as org/name",
            )
        return None
    return Repository(repo, loaded.config.revision or "main", show=loaded.config.observability.progress).get(weights)


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment forbids downloads."""
    value = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


@frozen
class Repository:
    """Revision of a model on the Hub.

    Attributes:
        repo: its name, ``org/name``.
        revision: branch, tag or commit.
        show: whether downloads show a progress bar on a terminal.
    """

    repo: str
    revision: str
    show: bool = True

    def get(self, weights: bool = True) -> HubModel:
        """Return the model from the cache, with what is missing there downloaded first.

        Raises:
            ModelError: see `find_hub_model`.
            CapacityError: if the disk has too little room.
        """
        cached = self._cached()
        pinned = cached is not None and _COMMIT.fullmatch(self.revision) is not None
        if cached is not None and pinned and not (weights and cached.missing):
            return cached  # a commit never changes
        if is_offline():
            return self._offline(cached, "HF_HUB_OFFLINE is set", weights)
        try:
            info = self._api().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=_TIMEOUT)
        except Exception as error:
            if _is_unreachable(error):
                return self._offline(cached, f"{self._endpoint()} cannot be reached ({error})", weights)
            raise as_model_error(error, self.repo, self.revision, self._endpoint(), self._api()) from error
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        return self._download(str(info.sha), sizes, weights)

    def _download(self, commit: str, sizes: Mapping[str, int], weights: bool) -> HubModel:
        """Download what is missing of a commit. `sizes` has the bytes of its files by name."""
        small = [name for name in sizes if is_small(name)]
        if "config.json" not in sizes:
            raise ModelError(
                f"{self.repo!r} on the Hub has no config.json, so it is no model that can be loaded",
                fix="name a repository in transformers' form, with config.json and safetensors",
            )
        folder = self._fetch(commit, small, sizes)
        wanted = weight_files(sizes, partial(_index, folder))
        if weights:
            folder = self._fetch(commit, wanted, sizes)
        missing = tuple(name for name in wanted if not (folder / name).exists())
        return HubModel(repo=self.repo, revision=self.revision, commit=commit, folder=folder, missing=missing)

    def _fetch(self, commit: str, names: list[str], sizes: Mapping[str, int]) -> Path:
        """Download files of a commit into the cache and return the snapshot's folder."""
        from huggingface_hub import snapshot_download

        folder = self._storage() / "snapshots" / commit
        new = [name for name in names if not (folder / name).exists()]
        if not new:
            _remember(self._storage(), self.revision, commit)
            return folder
        self._refuse_full_disk(sum(sizes.get(name, 0) for name in new))
        try:
            found = snapshot_download(
                self.repo,
                revision=commit,
                cache_dir=hub_cache(),
                endpoint=self._endpoint(),
                allow_patterns=[_literally(name) for name in new],
                tqdm_class=None if self.show and sys.stderr.isatty() else _quiet(),
            )
        except Exception as error:
            raise as_model_error(error, self.repo, self.revision, self._endpoint(), self._api()) from error
        if lost := [name for name in new if not (folder / name).exists()]:  # it returns what it has, without a network
            raise ModelError(
                f"the download of {self.repo!r} from {self._endpoint()} broke off: {', '.join(lost[:4])} are missing",
                fix="run the command again: what arrived is kept",
            )
        _remember(self._storage(), self.revision, commit)
        return Path(found)

    def _refuse_full_disk(self, needed: int) -> None:
        existing = next(place for place in (self._storage(), *self._storage().parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise CapacityError(
                f"{self.repo!r} needs {needed / 2**30:.1f} GiB, and the disk of {hub_cache()} has {free / 2**30:.1f} "
                "GiB left",
                fix="free some space (`hf cache ls`, `hf cache rm`), or set HF_HOME to a folder on a larger disk",
            )

    def _cached(self) -> HubModel | None:
        """Return what the cache holds of the revision, or None."""
        commit = self.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = (self._storage() / "refs" / self.revision).read_text().strip()
            except (OSError, ValueError):
                return None
        folder = self._storage() / "snapshots" / commit
        if not (folder / "config.json").is_file():
            return None
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.exists()]
        missing = [name for name in weight_files(files, partial(_index, folder)) if name not in files]
        if not missing and not any(name.endswith((".safetensors", ".bin")) for name in files):
            missing = ["all weight files"]
        return HubModel(repo=self.repo, revision=self.revision, commit=commit, folder=folder, missing=tuple(missing))

    def _offline(self, cached: HubModel | None, why: str, weights: bool) -> HubModel:
        """Return what the cache holds, or refuse."""
        if cached is None or (weights and cached.missing):
            raise no_cache_error(self.repo, self.revision, why, () if cached is None else cached.missing)
        if not is_offline():
            logger.warning("%s: commit %s of the cache is used, since %s", self.repo, cached.commit[:12], why)
        return cached

    def _storage(self) -> Path:
        return hub_cache() / f"models--{self.repo.replace('/', '--')}"

    def _endpoint(self) -> str:
        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._endpoint(), library_name="slotline")


def _index(folder: Path, name: str) -> Mapping[str, Any]:
    """Return an index of weight files, empty if it is not in the folder or broken, which the loader will say."""
    try:
        found = read_json(folder / name)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _is_unreachable(error: Exception) -> bool:
    """Return True if an error says that there is no way to the Hub, or that the Hub is down."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return bool(kinds & {"TransportError", "OfflineModeIsEnabled"}) or status >= 500


def _remember(storage: Path, revision: str, commit: str) -> None:
    """Keep the commit of a branch or tag for use without a network, as huggingface_hub does."""
    file = storage / "refs" / revision
    if _COMMIT.fullmatch(revision) or ".." in Path(revision).parts:
        return
    try:
        if not file.is_file() or file.read_text() != commit:
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(f".{file.name}.{os.getpid()}")
            scratch.write_text(commit)
            scratch.replace(file)
    except OSError as error:
        logger.warning("the commit of %s cannot be kept in %s: %s", revision, file, error)


def _literally(name: str) -> str:
    """Return a pattern that matches one file name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _quiet() -> type[Any]:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Quiet(tqdm):
        """Bar that is never shown."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Quiet
