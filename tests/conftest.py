"""What every test may ask for: data files and a browser."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A first call may compile a kernel, and machines are shared: no example is failed for its time.
settings.register_profile("gossamer", deadline=None)
settings.load_profile("gossamer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-browser", action="store_true", help="fail browser tests where Chromium is missing")


@pytest.fixture
def data_file() -> Callable[[str], Path]:
    """A file of the data folder; the test is skipped, naming the file, where it is not there."""

    def find(name: str) -> Path:
        root = os.environ.get("GOSSAMER_DATA")
        path = Path(root or "", name)
        if not root or not path.is_file():
            pytest.skip(f"needs GOSSAMER_DATA: {name}")
        return path

    return find


@dataclass(frozen=True)
class Page:
    """What a browser made of a page: its document after scripts ran, and the errors on its console."""

    document: str
    errors: list[str]
    requests: list[str]

    @property
    def text(self) -> str:
        """What a reader sees, without tags, scripts and styles."""
        bare = re.sub(r"<(script|style)\b.*?</\1>", " ", self.document, flags=re.DOTALL)
        return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", bare))


@pytest.fixture
def browse(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Page]:
    """Open a local page in headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        reason = "needs Chromium (Debian: apt-get install chromium)"
        (pytest.fail if request.config.getoption("--require-browser") else pytest.skip)(reason)

    def open_page(path: Path) -> Page:
        net_log = tmp_path / "net.json"
        command = [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={net_log}", "--enable-logging=stderr", "--v=0",
            "--window-size=1200,900", "--virtual-time-budget=10000", "--dump-dom", path.resolve().as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        log = net_log.read_text(errors="replace")
        wanted = set(re.findall(r'"url":"(https?://[^"]+)"', log))
        return Page(done.stdout, console, sorted(url for url in wanted if "google" not in url))

    return open_page
