"""The page of a run in Debian's headless Chromium: no console errors, no sideways scrolling of the page."""

import re
import shutil
import subprocess

import pytest

from hetmesh.records.run_view import read_run
from hetmesh.report.page import page_html
from support.written_runs import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ASK = (
    "<script>parent.postMessage([innerWidth, document.documentElement.scrollWidth, "
    "getComputedStyle(document.body).backgroundColor, "
    "[...document.querySelectorAll('img')].every(e => e.getBoundingClientRect().height > 20)].join(' '), '*')</script>"
)
FRAME = (  # a window is at least 500 wide, a frame in it as narrow as a phone
    '<!DOCTYPE html><html><head><meta name="color-scheme" content="light dark"></head><body>'
    "<script>onmessage = event => { document.body.dataset.seen = event.data }</script>"
    '<iframe src="page.html" style="border: 0; width: %dpx; height: 3000px"></iframe></body></html>'
)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path_factory.mktemp("run"), "recipes/digits_moe.toml", name="llm" + "_long" * 20)
    return page_html(read_run(folder), folder)


def opened(text, tmp_path, width, scheme="light"):
    """What the browser has of a page in a frame of that width: its document, and what its console says."""
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, encoding="utf-8")
    # a profile of its own; /dev/shm is small in containers
    base = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    base += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", f"--window-size={width + 100},3000"]
    base += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [*base, "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_a_page_renders_without_errors(page, tmp_path, width, scheme):
    assert opened(page, tmp_path, width, scheme)[1] == []
    # the page itself lets no script run, so that a copy without that rule is asked
    document, said = opened(POLICY.sub("", page).replace("</body>", f"{ASK}</body>"), tmp_path, width, scheme)
    assert said == []
    colour = "rgb(22, 25, 29)" if scheme == "dark" else "rgb(255, 255, 255)"
    assert f'data-seen="{width} {width} {colour} true"' in document


def test_a_page_lets_no_script_run_and_errors_are_seen(page, tmp_path):
    document, said = opened(page.replace("</body>", f"{ASK}</body>"), tmp_path, 400)
    assert "data-seen" not in document
    assert said
