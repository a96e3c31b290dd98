from __future__ import annotations

import pytest

from tcache._triton import SUPPORTED, check_release
from tcache.errors import UnsupportedTriton


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0+git12", "3.9.0"])
def test_supported(version):
    assert check_release(version) in SUPPORTED


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "2.1.0", "4.0", "unknown", "3.60.0"])
def test_unsupported_is_one_clear_error(version):
    with pytest.raises(UnsupportedTriton, match=r"3\.6, 3\.7, 3\.8, 3\.9") as error:
        check_release(version)
    assert version in error.value.message
    assert "pip install" in error.value.hint
