"""The only door to Triton's internals.

Everything tcache takes from Triton beyond ``triton.jit`` and ``triton.Config`` passes through this
package, so that a new release is one review. Features are probed, not guessed from version numbers;
the version is only compared with the list of releases whose keys are known to be exact, because a
wrong guess here would be a wrong key.
"""

from __future__ import annotations

import re

from tcache.errors import UnsupportedTriton

__all__ = ["SUPPORTED", "check_release", "release"]

SUPPORTED = ((3, 6), (3, 7), (3, 8), (3, 9))


def check_release(version: str) -> tuple[int, int]:
    """Return ``(major, minor)`` of a supported Triton version string.

    Raises:
        UnsupportedTriton: the release is not in :data:`SUPPORTED`.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise UnsupportedTriton(
            f"Triton {version} is not supported: tcache computes exact keys for Triton {known}",
            f'install one of these, for example: pip install "triton=={SUPPORTED[-1][0]}.{SUPPORTED[-1][1]}.*"',
        )
    return found


try:
    import triton as _upstream
except ImportError as error:
    raise UnsupportedTriton(f"Triton cannot be imported: {error}", "pip install triton") from error

release: str = _upstream.__version__
check_release(release)
