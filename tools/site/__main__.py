"""`python -m tools.site`, which `make docs` runs."""

import os
import sys
import time

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # the theme's advertisement for its successor


def main() -> int:
    """Build the site and say where it is. Returns the exit code."""
    try:
        from . import build
    except ImportError as error:
        print(f"{error}; install the tools of the site: pip install -e '.[lab]' --group docs", file=sys.stderr)
        return 1
    from .stage import StageError

    begin = time.monotonic()
    try:
        build.write(build.all_pages(), build.PAGES)
        pages = build.make()
    except (build.SiteError, StageError) as error:
        print(error, file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in build.SITE.rglob("*") if path.is_file())
    seconds = time.monotonic() - begin
    print(
        f"{len(pages)} pages, {size / 1e6:.1f} MB, {seconds:.0f} s; links to other sites: {build.SITE}/{build.EXTERNAL}"
    )
    print(f"open {build.SITE}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
