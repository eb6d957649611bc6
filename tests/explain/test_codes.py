"""Codes of F-SNE as numbers and pictures: Table 6, Figures 4 and 5 of the paper by hand-made cases."""

import json

import pytest
import torch
from safetensors.torch import save_file

from regard.core import DataError, StoreError
from regard.explain.codes import code_books, compare, cosines, norms, regression, transfer
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import save
from regard.projections.sne import FSNE, Codes

HOST = "vit_desk(size=8, patch=4, dim=8, depth=2, heads=2)"


def model(codes=None, tied=True, mixer=Softmax):
    trained = create_model(HOST, mixer(projection=FSNE(code=4, tied=tied)))
    if codes is not None:
        with torch.no_grad():
            trained.regard_shared[0].weight.copy_(torch.tensor(codes))
    return trained


AXES = [[2.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 4.0, 3.0, 0]]


def test_norms_and_cosines_by_hand():
    (book,) = code_books(model(AXES))
    assert book["roles"] == "qkv"
    assert book["codes"] == AXES
    assert norms(book) == {"q": 2.0, "k": 3.0, "v": 5.0}
    assert cosines(book, book) == [[1, 0, 0], [0, 1, pytest.approx(0.8)], [0, pytest.approx(0.8), 1]]


def test_rows_are_the_first_model_and_columns_the_second():
    """Query of a against key of b stands at row 0, column 1."""
    a = code_books(model([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]]))[0]
    b = code_books(model([[0, 0, 0, 1.0], [5.0, 0, 0, 0], [0, -1.0, 0, 0]]))[0]
    assert cosines(a, b) == [[0, 1, 0], [0, 0, -1], [0, 0, 0]]
    data = compare({"ImageNet": a, "Cars": b})["between"][0]
    assert (data["rows"], data["columns"]) == ("ImageNet", "Cars")
    assert data["cosines"] == cosines(a, b)


def test_every_source_gives_the_same_codes(tmp_path):
    trained = model(AXES)
    state = trained.state_dict()
    save(trained, tmp_path / "saved")
    save_file(state, tmp_path / "state.safetensors")
    (tmp_path / "run").mkdir()
    torch.save({"version": 1, "model": state, "ema": None}, tmp_path / "run" / "last.ckpt")
    for source in (trained, state, tmp_path / "saved", tmp_path / "state.safetensors", tmp_path / "run"):
        (book,) = code_books(source)
        assert book["codes"] == AXES
        assert book["name"] == "regard_shared.0"


def test_the_average_is_read_where_there_is_one(tmp_path):
    torch.save({"model": model().state_dict(), "ema": model(AXES).state_dict()}, tmp_path / "last.ckpt")
    assert code_books(tmp_path)[0]["codes"] == AXES


def test_own_codes_are_one_book_a_layer():
    trained = model(tied=False)
    names = ["blocks.0.attn.regard.qkv.codes", "blocks.1.attn.regard.qkv.codes"]
    assert [book["name"] for book in code_books(trained)] == names
    assert code_books(trained.state_dict()) == code_books(trained)
    with pytest.raises(DataError, match=r"2 code books \(blocks.0"):
        compare({"own": trained})
    first, second = code_books(trained)
    assert len(compare({"first": first, "second": second})["between"]) == 1


def test_a_mechanism_without_keys_has_two_codes():
    trained = model(mixer=SKA)
    (book,) = code_books(trained)
    assert book["roles"] == "qv"
    assert list(norms(book)) == ["q", "v"]
    assert code_books(trained.state_dict(), roles="qv") == [book]
    matrix = cosines(book, code_books(model())[0])
    assert [len(matrix), len(matrix[0])] == [2, 3]


def test_a_zero_code_has_no_direction():
    book = {"roles": "qk", "codes": [[0.0] * 4, [1.0, 0.0, 0.0, 0.0]]}
    assert cosines(book, book) == [[None, None], [None, 1.0]]
    data = compare({"zero": book, "axes": model(AXES)})
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_an_untrained_code_of_8_numbers_has_a_length_of_about_the_root_of_8():
    """Table 6 has 8.1 to 9.1 after training."""
    torch.manual_seed(0)
    lengths = [
        length for _ in range(40) for length in norms(code_books({"codes.weight": Codes("qkv", 8).weight})[0]).values()
    ]
    assert 2.4 < sum(lengths) / len(lengths) < 3.1


def test_regression_by_hand_and_by_torch():
    line = regression([1.0, 2.0, 3.0], [5.0, 7.0, 9.0])
    assert line == {"n": 3, "slope": pytest.approx(2), "intercept": pytest.approx(3), "r": pytest.approx(1)}
    assert regression([1.0, 2.0, 3.0], [9.0, 7.0, 5.0])["r"] == pytest.approx(-1)
    x, y = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    books = regression(x.tolist(), y.tolist())
    slope, intercept = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y).solution.tolist()
    assert (books["slope"], books["intercept"]) == (pytest.approx(slope), pytest.approx(intercept))
    assert books["r"] == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())


def test_regression_says_none_where_there_is_no_line():
    for x, y in (([], []), ([1.0], [2.0]), ([1.0, 1.0], [0.0, 2.0])):
        assert regression(x, y) == {"n": len(x), "slope": None, "intercept": None, "r": None}
    level = regression([1.0, 2.0], [3.0, 3.0])
    assert (level["n"], level["slope"], level["r"]) == (2, 0, None)


# Table 2 (ImageNet) and Table 4 (transfer), XCiT-N12: linear, SNE, P-SNE, F-SNE 8, 8*, 16, 16*, 32, 64
NANO = {
    "ImageNet": (69.9, 70.9, 71.4, 70.6, 70.8, 70.2, 70.6, 70.3, 70.2),
    "CIFAR-10": (98.0, 98.4, 98.2, 98.1, 98.3, 98.3, 98.3, 98.1, 98.1),
    "Cars": (87.9, 88.9, 88.9, 89.0, 89.0, 90.2, 90.5, 90.6, 89.1),
}


def test_figure_5_from_the_published_tables():
    """Better on ImageNet goes with better on CIFAR-10; on Cars it does not."""
    rows = {str(i): {name: values[i] for name, values in NANO.items()} for i in range(9)}
    books = {entry["name"]: entry for entry in transfer(rows, "ImageNet")["sets"]}
    assert list(books) == ["CIFAR-10", "Cars"]
    for name, entry in books.items():
        line = regression(list(NANO["ImageNet"]), list(NANO[name]))
        assert (entry["slope"], entry["r"]) == (line["slope"], line["r"])
    assert books["CIFAR-10"]["slope"] > 0
    assert books["CIFAR-10"]["r"] > 0.3


def test_models_without_a_number_are_left_out():
    rows = {"a": {"s": 1.0, "t": 2.0}, "b": {"s": 2.0}, "c": {"t": 5.0}, "d": {"s": 3.0, "t": 4.0}}
    (entry,) = transfer(rows, "s")["sets"]
    assert (entry["models"], entry["x"], entry["y"]) == (["a", "d"], [1.0, 3.0], [2.0, 4.0])


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: code_books(create_model(HOST, Softmax())), DataError, "has no codes"),
        (lambda: code_books({"a.weight": torch.zeros(2, 2)}), DataError, "1 tensors has no codes"),
        (lambda: code_books({"codes.weight": torch.zeros(2, 8)}), DataError, "pass roles="),
        (lambda: code_books("nowhere"), StoreError, "nowhere is neither a folder"),
        (lambda: compare({}), DataError, "at least one"),
        (
            lambda: compare({"a": {"codes.weight": torch.ones(3, 8)}, "b": {"codes.weight": torch.ones(3, 4)}}),
            DataError,
            "8 and 4",
        ),
        (lambda: regression([1.0], [1.0, 2.0]), DataError, "do not form pairs"),
        (lambda: transfer({"a": {"s": 1.0}}, "t"), DataError, "'t'"),
    ],
)
def test_wrong_use_says_what_was_expected(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.untyped
def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"nothing")
    with pytest.raises(StoreError, match="last.ckpt cannot be read"):
        code_books(tmp_path)
    torch.save({"step": 3}, tmp_path / "last.ckpt")
    with pytest.raises(StoreError, match="no state dict"):
        code_books(tmp_path)
