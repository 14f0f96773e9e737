import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces", metavar="FOLDER", help="captured attention, for the golden rows (bench/results/quality.json)"
    )
