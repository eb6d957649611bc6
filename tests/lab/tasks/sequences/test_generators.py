"""ListOps and Pathfinder: the labels, and that nothing but the order of symbols tells them."""

import statistics

import numpy as np
import pytest
from scipy.stats import ks_2samp

from regard.core import DataError
from regard.images.streams import generator
from regard.lab.tasks.sequences import listops, matching, pathfinder
from regard.lab.tasks.sequences.cache import load_or_make
from regard.lab.tasks.sequences.listops import LISTOPS, OPERATORS, SYMBOLS
from regard.lab.tasks.sequences.pathfinder import DASH, GAP, PATHFINDER

MINI = LISTOPS["listops-mini"]


def evaluated(words):
    """The value and the depth of nested operators of a list of words, by a stack."""
    stack, depth, deepest = [[]], 0, 0
    functions = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda values: int(statistics.median(values)),
        "[SM": lambda values: sum(values) % 10,
    }
    for word in words:
        if word in functions:
            stack.append([word])
            depth += 1
            deepest = max(deepest, depth)
        elif word == "]":
            name, *values = stack.pop()
            assert len(values) >= 2
            stack[-1].append(functions[name](values))
            depth -= 1
        else:
            stack[-1].append(int(word))
    assert len(stack) == 1
    assert len(stack[0]) == 1
    return stack[0][0], deepest


def words_of(split, row):
    starts = split.tokens.starts
    return [SYMBOLS[symbol] for symbol in split.tokens.symbols[starts[row] : starts[row + 1]]]


@pytest.mark.parametrize("name", LISTOPS)
def test_listops_have_the_value_of_an_independent_evaluator(name):
    spec = LISTOPS[name]
    split = listops.samples(spec, "test", 60 if name == "listops" else 400)
    depths = []
    for row in range(len(split)):
        value, depth = evaluated(words_of(split, row))
        assert value == split.labels[row]
        depths.append(depth)
    assert max(depths) <= spec.depth
    assert max(depths) == spec.depth or name == "listops-mini"
    assert split.tokens.lengths.min() >= spec.shortest
    assert split.tokens.lengths.max() <= spec.longest


def test_listops_have_the_published_lengths_and_labels():
    split = listops.samples(LISTOPS["listops"], "statistics", 500)
    assert 970 < split.tokens.lengths.mean() < 1090  # 1,020 in an independent implementation, deviation 420
    share = np.bincount(split.labels).max() / len(split)
    assert 0.13 < share < 0.23  # about 0.18


def test_listops_are_different_and_a_function_of_their_seed():
    first, again, other = (listops.samples(MINI, seed, 300) for seed in ("a", "a", "b"))
    texts = {" ".join(words_of(first, row)) for row in range(300)}
    assert len(texts) == 300
    assert np.array_equal(first.tokens.symbols, again.tokens.symbols)
    assert not np.array_equal(first.labels, other.labels)
    used = set(first.tokens.symbols.tolist())
    assert used == set(range(len(SYMBOLS)))


@pytest.mark.parametrize(
    ("text", "value"), [("[MED 1 2 4 9 ]", 3), ("[MED 1 2 9 ]", 2), ("[SM 9 9 9 ]", 7), ("[MIN 3 [MAX 0 1 ] 8 ]", 1)]
)
def test_values_by_hand(text, value):
    assert evaluated(text.split())[0] == value
    assert [SYMBOLS[symbol] for symbol in listops.encode(text, "it")] == text.split()


def test_an_unknown_word_is_named():
    with pytest.raises(DataError, match=r"line 3: word 2 is '11'; ListOps has 0 1"):
        listops.encode("[MAX 11 ]", "line 3")
    with pytest.raises(DataError, match="is empty"):
        listops.encode("  ", "line 3")
    assert len(OPERATORS) == 4


# Pathfinder


def connected(scene):
    """Whether the dots are joined by dashes: from the geometry alone."""
    dashes = scene.dashes
    # the next dash of a contour starts one gap behind the end, in its own direction
    headings = (dashes[:, 1] - dashes[:, 0]) / DASH
    gaps = dashes[:, None, 1] + GAP * headings - dashes[:, 0]  # from the end of dash i to the start of dash j
    follows = (np.abs(gaps) < 1e-9).all(-1) & ~np.eye(len(dashes), dtype=bool)
    joined = [np.flatnonzero(row).tolist() for row in follows | follows.T]
    ends = [[i for i, dash in enumerate(dashes) if np.abs(dash - dot).sum(-1).min() < 1e-9] for dot in scene.dots]
    assert all(len(end) == 1 for end in ends)
    reached, border = set(ends[0]), ends[0]
    while border:
        border = [j for i in border for j in joined[i] if j not in reached]
        reached |= set(border)
    return int(ends[1][0] in reached)


@pytest.fixture(scope="module")
def scenes():
    return {
        name: [pathfinder.scene(generator("test", name, index), spec) for index in range(count)]
        for (name, spec), count in zip(PATHFINDER.items(), (4, 16, 300), strict=True)
    }


@pytest.mark.parametrize("name", PATHFINDER)
def test_the_label_is_that_of_the_graph(scenes, name):
    assert {connected(scene) for scene in scenes[name]} == {0, 1}
    for scene in scenes[name]:
        assert connected(scene) == scene.label


@pytest.mark.parametrize("name", PATHFINDER)
def test_contours_keep_clear_of_each_other(scenes, name):
    spec = PATHFINDER[name]
    for scene in scenes[name]:
        counts = np.bincount(scene.contour)
        assert counts.tolist() == [spec.dashes] * 2 + [spec.dashes // 3] * pathfinder.DISTRACTORS
        assert scene.dashes.min() >= pathfinder.BORDER
        assert scene.dashes.max() <= spec.side - pathfinder.BORDER
        points = scene.dashes[:, :1] + np.linspace(0, 1, 9)[:, None] * (scene.dashes[:, 1:] - scene.dashes[:, :1])
        for a in range(counts.size):
            for b in range(a):
                first, second = points[scene.contour == a].reshape(-1, 2), points[scene.contour == b].reshape(-1, 2)
                assert np.linalg.norm(first[:, None] - second, axis=-1).min() > GAP


def test_neither_the_distance_nor_the_place_of_the_dots_tells_the_label(scenes):
    found = scenes["pathfinder-mini"]
    labels = np.array([scene.label for scene in found])
    assert 0.41 < labels.mean() < 0.59  # 300 draws, deviation 0.029
    dots = np.stack([scene.dots for scene in found])
    middle = PATHFINDER["pathfinder-mini"].side / 2
    quantities = {
        "distance": np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1),
        "first from the middle": np.linalg.norm(dots[:, 0] - middle, axis=-1),
        "second from the middle": np.linalg.norm(dots[:, 1] - middle, axis=-1),
    }
    for name, values in quantities.items():
        assert ks_2samp(values[labels == 1], values[labels == 0]).pvalue > 0.01, name


def test_neither_the_brightness_nor_the_pixels_tell_the_label(scenes):
    from sklearn.linear_model import LogisticRegression

    found = scenes["pathfinder-mini"]
    labels = np.array([scene.label for scene in found])
    pixels = np.stack([pathfinder.draw(scene, 24).reshape(-1) for scene in found]) / 255
    model = LogisticRegression(C=0.01).fit(pixels[:150], labels[:150])
    assert model.score(pixels[150:], labels[150:]) < 0.62  # chance 0.5, deviation 0.041
    assert ks_2samp(*(pixels.sum(1)[labels == label] for label in (0, 1))).pvalue > 0.01


def test_a_picture_shows_dots_and_dashes(scenes):
    scene = scenes["pathfinder"][0]
    picture = pathfinder.draw(scene, 32)
    for x, y in scene.dots:
        assert picture[int(y), int(x)] == 255
    for x, y in scene.dashes.mean(1):
        assert picture[max(int(y) - 1, 0) : int(y) + 2, max(int(x) - 1, 0) : int(x) + 2].max() > 50


# the cache


def test_parts_are_generated_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make(index):
        made.append(index)
        return listops.samples(MINI, f"cache{index}", 5)

    first = load_or_make("few", 3, make)
    assert sorted(made) == [0, 1, 2]
    again = load_or_make("few", 3, make)
    assert len(made) == 3
    assert np.array_equal(first.tokens.symbols, again.tokens.symbols)
    assert np.array_equal(first.labels[5:10], listops.samples(MINI, "cache1", 5).labels)
    damaged = sorted((tmp_path / "regard" / "sequences").iterdir())[1]
    damaged.write_bytes(damaged.read_bytes()[:150])
    assert np.array_equal(load_or_make("few", 3, make).labels, first.labels)
    assert made[3:] == [1]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "regard").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    split = load_or_make("few", 2, lambda index: listops.samples(MINI, str(index), 5))
    assert len(split) == 10
    assert caplog.text.count("not cached") == 1


def test_pairs_are_the_same_if_they_agree_on_x() -> None:
    split = matching.samples("test", 400)
    starts, symbols = split.tokens.starts, split.tokens.symbols.tobytes().decode()
    texts = [symbols[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    facts = [dict(zip(text[::2], text[1::2], strict=True)) for text in texts]
    assert all(2 * len(of) == len(text) for of, text in zip(facts, texts, strict=True))  # no letter twice
    said = [of["x"] for of in facts]
    assert [int(one == other) for one, other in zip(said[::2], said[1::2], strict=True)] == split.labels.tolist()
    assert split.labels.sum() == 200
    assert {len(text) for text in texts} == set(range(2, matching.LENGTH + 1, 2))
