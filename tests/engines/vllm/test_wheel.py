"""What is tested is the wheel."""

from tests.engines.wheel import foreign_packages, is_editable


def test_our_packages_come_from_the_wheel() -> None:
    assert foreign_packages() == {}
    assert not is_editable()
