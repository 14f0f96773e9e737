"""tools/check_links.py: what it says of the links that Sphinx has tried."""

import socket
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
try:
    from check_links import host_answers, judge
finally:
    sys.path.remove(str(TOOLS))


def link(status, info="", uri="https://a.org/b"):
    """A row of Sphinx's output.json, as far as it is read."""
    return {"filename": "a.md", "lineno": 3, "status": status, "uri": uri, "info": info}


WITHIN = link("unchecked", uri="#options")
UNRESOLVED = link("broken", "Failed to resolve 'a.org'")


@pytest.mark.parametrize(
    ("links", "online", "code", "told"),
    [
        ([WITHIN], False, 0, "0 links to other sites checked, 0 broken"),
        ([WITHIN, link("working")], True, 0, "1 link to other sites checked, 0 broken"),
        ([WITHIN, link("redirected")], True, 0, "1 link to other sites checked, 0 broken"),
        ([link("broken", "404 Client Error")], True, 1, "a.md:3: https://a.org/b: 404 Client Error\n1 link"),
        ([link("working"), UNRESOLVED], True, 1, "Failed to resolve 'a.org'\n2 links to other sites checked, 1 broken"),
        ([link("working"), link("timeout")], False, 1, "https://a.org/b: timeout\n2 links to other sites checked"),
        ([WITHIN, UNRESOLVED], False, 2, "Failed to resolve 'a.org'\n0 of 1 link to other sites checked: no host"),
        ([link("timeout"), UNRESOLVED], False, 2, "0 of 2 links to other sites checked"),
    ],
)
def test_what_is_said_of_links_is_what_came_of_them(links, online, code, told):
    found, text = judge(links, lambda uri: online)
    assert found == code
    assert told in text


def test_a_host_answers_where_something_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}/page"
        assert host_answers(uri)
    assert not host_answers(uri)
