"""Builds the documentation site: `python -m docs.site build`, `serve`, `figures` or `screenshots`.

`build` and `serve` need the extra `docs`. `figures` draws the figures of the concepts and needs matplotlib.
`screenshots` needs Chromium, and a built site for the picture of the site. `build` is strict: a broken link or anchor
is an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from docs.site.figures import draw
from docs.site.screenshots import take, take_site
from docs.site.source import ROOT
from docs.site.stage import finish, stage

TARGET = ROOT / "build" / "docs"


def build(target: Path = TARGET) -> int:
    """Build the site strictly below `target`; return Zensical's exit code."""
    if find_spec("zensical") is None:
        print("docs: Zensical is not installed; pip install -e '.[docs]'", file=sys.stderr)
        return 1
    config = stage(target)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    code = subprocess.run(command, check=False).returncode
    finish(target / "site")
    return code


def serve(port: int, target: Path = TARGET) -> int:
    """Serve the built site at 127.0.0.1."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(target / "site"))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(
            f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it; {target / 'site' / 'index.html'} opens without)"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("what", choices=("build", "serve", "figures", "screenshots"))
    parser.add_argument("--port", type=int, default=8000, help="of serve; 0 for any that is free")
    options = parser.parse_args()
    if options.what == "figures":
        draw(ROOT / "docs" / "reference" / "figures")
        return 0
    if options.what == "screenshots":
        folder = ROOT / "docs" / "guide" / "figures"
        site = TARGET / "site"
        for path in [*([take_site(site, folder / "site.png")] if site.is_dir() else []), *take(folder)]:
            print(path.relative_to(ROOT), f"{path.stat().st_size / 1000:.0f} kB")
        return 0
    return build() if options.what == "build" else serve(options.port)


if __name__ == "__main__":
    sys.exit(main())
