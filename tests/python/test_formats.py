"""Summary formats: names, codes, and the bytes that the design promises."""

import itertools

import pytest
from locks.formats import DEFAULT, HEAD_DIMS, PRESETS, Format, parse_format

# page tokens, rank, bits of centroid, basis and coefficients, improved; record bytes at d = 64, 128, 256
PROMISED = {
    "fine": ((4, 1, 4, 4, 4, True), (288, 544, 1056)),
    "fine8": ((4, 1, 8, 8, 4, True), (544, 1056, 2080)),
    "compact": ((8, 1, 4, 4, 4, True), (160, 288, 544)),
    "wide": ((16, 8, 8, 4, 4, True), (416, 736, 1376)),
    "paper": ((16, 8, 8, 4, 8, False), (480, 800, 1440)),
}
SHAPES = [(4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4), (16, 8)]


def fields(form):
    return (
        form.page_tokens, form.rank, form.centroid_bits, form.basis_bits, form.coefficient_bits, form.improved
    )


def test_presets_are_the_promised_ones():
    assert set(PRESETS) == set(PROMISED) and DEFAULT == "fine"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fields_and_bytes(name):
    form = Format.parse(name)
    expected, sizes = PROMISED[name]
    assert fields(form) == expected
    assert tuple(form.record_bytes(d) for d in (64, 128, 256)) == sizes
    assert form.name == name


@pytest.mark.parametrize(("page", "rank"), SHAPES)
def test_general_spelling_has_one_code_each(page, rank):
    for centroid, basis, coefficients, improved in itertools.product((4, 8), (4, 8), (4, 8), (True, False)):
        name = f"b{page}r{rank}m{centroid}v{basis}c{coefficients}" + ("" if improved else "-plain")
        form = parse_format(name)
        assert fields(form) == (page, rank, centroid, basis, coefficients, improved)
        assert 0 <= form.code <= 255
        assert parse_format(form.name) == form


@pytest.mark.parametrize("name", PRESETS)
def test_record_bytes_fit_every_head_size(name):
    form = Format.parse(name)
    for head_dim in HEAD_DIMS:
        page_bytes = head_dim * form.centroid_bits // 8 + form.rank * head_dim * form.basis_bits // 8
        page_bytes += form.page_tokens * form.rank * form.coefficient_bits // 8 + 2 * (1 + form.rank)
        least = 16 // form.page_tokens * page_bytes + 8  # and the header
        assert form.record_bytes(head_dim) % 32 == 0
        assert least <= form.record_bytes(head_dim) < least + 40  # one alignment of 8, one of 32


def test_share_of_cache():
    assert Format.parse("fine").share_of_cache(128) == pytest.approx(544 / 8192)


@pytest.mark.parametrize(
    "name",
    ["", "FINE", "fine ", "fine9", "b4r1", "b4r4m4v4c4", "b5r1m4v4c4", "b4r1m5v4c4", "b4r1m4v4c4-plainer"],
)
def test_parse_refuses_a_name(name):
    with pytest.raises(ValueError, match="expected") as refusal:
        Format.parse(name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [None, 4, b"fine"])
def test_parse_refuses_what_is_no_name(name):
    with pytest.raises(ValueError, match="format = .*, expected a name such as fine"):
        Format.parse(name)


@pytest.mark.parametrize("head_dim", [0, -64, 65, 512])
def test_record_bytes_refuses_a_head_size(head_dim):
    with pytest.raises(ValueError, match=f"head_dim = {head_dim}, expected 64, 80, 96, 128, 192, 256"):
        Format.parse("fine").record_bytes(head_dim)
