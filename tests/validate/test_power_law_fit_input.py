"""Tables of measured losses: what is read, what is guessed, and how refused rows are named."""

import numpy as np
import pandas as pd
import pytest

from theory.results import DomainError
from validate.fits.table_input import choose_columns, read_losses

DEPTHS = [1, 4, 16, 64, 256]
LOSSES = [1.0, 0.62500000000000011, 0.53125, 0.5078125, 0.501953125]


def written(tmp_path, text, name="losses.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def table(delimiter=",", header=("depth", "loss")):
    lines = [delimiter.join(header)]
    lines += [f"{depth}{delimiter}{loss!r}" for depth, loss in zip(DEPTHS, LOSSES, strict=True)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", " "])
def test_any_usual_delimiter(tmp_path, delimiter):
    data = read_losses(written(tmp_path, table(delimiter)))
    assert data.depths.tolist() == DEPTHS
    # Every digit arrives.
    assert data.losses.tolist() == LOSSES
    assert data.rows == tuple(f"line {n}" for n in range(2, 7))


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_ends_byte_order_marks_and_blank_lines(tmp_path, ending):
    text = "\ufeff\n" + table().replace("16,", "\n16,") + "\n\n"
    data = read_losses(written(tmp_path, text.replace("\n", ending)))
    assert data.depths.tolist() == DEPTHS
    assert data.rows[:3] == ("line 3", "line 4", "line 6")


def test_parquet_and_data_frame_agree_with_csv(tmp_path):
    frame = pd.DataFrame({"Depth": DEPTHS, "eval_loss": LOSSES, "seed": 7})
    path = tmp_path / "losses.parquet"
    frame.to_parquet(path)
    for source in (path, str(path), frame):
        data = read_losses(source)
        assert data.depths.tolist() == DEPTHS
        assert data.losses.tolist() == LOSSES
        assert data.rows[0] == "row 1"
    renamed = path.rename(tmp_path / "losses.dat")
    assert read_losses(renamed).losses.tolist() == LOSSES


def test_missing_values_of_a_data_frame_are_missing():
    frame = pd.DataFrame({"depth": pd.array([1, None, 16], dtype="Int64"), "loss": [1.0, 0.6, np.nan]})
    with pytest.raises(DomainError, match="row 2: depth is missing, row 3: loss is missing"):
        read_losses(frame)


def test_every_bad_row_is_named_by_its_line(tmp_path):
    text = "depth,loss\n1,1.0\n2,\n4,-0.5\n0,0.6\n16,abc\n32,inf\n64,0.5\n"
    with pytest.raises(DomainError) as failure:
        read_losses(written(tmp_path, text))
    for words in (
        "line 3: loss is missing", "line 4: loss -0.5 is not positive", "line 5: depth 0 is not positive",
        "line 6: loss 'abc' is not a number", "line 7: loss inf is not finite",
    ):  # fmt: skip
        assert words in str(failure.value)
    assert "line 8" not in str(failure.value)


def test_many_bad_rows_are_counted(tmp_path):
    text = "depth,loss\n" + "".join(f"{n},0\n" for n in range(1, 12))
    with pytest.raises(DomainError, match="line 7: loss 0 is not positive and 5 more"):
        read_losses(written(tmp_path, text))


def test_a_row_cut_off_at_the_end_is_named(tmp_path):
    with pytest.raises(DomainError, match="line 6: loss is missing"):
        read_losses(written(tmp_path, table()[: -len("0.501953125\n")]))


def test_a_row_with_too_many_cells_is_named(tmp_path):
    with pytest.raises(DomainError, match=r"2 columns.*line 4"):
        read_losses(written(tmp_path, table().replace("16,0.53125", "16,0.53125,9")))


def test_exact_repetitions_count_once_and_are_noted(tmp_path):
    data = read_losses(written(tmp_path, table() + "16,0.53125\n16,0.54\n"))
    assert data.depths.tolist() == [*DEPTHS, 16]
    assert data.notes == ("counted once: line 7 repeats line 4",)
    assert data.rows[-1] == "line 8"


def test_a_column_of_errors_is_used_only_when_named(tmp_path):
    text = "depth,loss,stderr\n1,1,0.1\n2,0.7,0.05\n4,0.6,0.02\n"
    data = read_losses(written(tmp_path, text))
    assert data.stderrs is None
    assert "--stderr stderr" in data.notes[0]
    data = read_losses(written(tmp_path, text), stderr="stderr")
    assert data.stderrs.tolist() == [0.1, 0.05, 0.02]
    assert data.notes == ()
    with pytest.raises(DomainError, match="line 3: stderr 0 is not positive"):
        read_losses(written(tmp_path, text.replace("0.05", "0")), stderr="stderr")


@pytest.mark.parametrize(
    ("names", "x", "y", "chosen"),
    [
        (["depth", "loss"], None, None, ("depth", "loss")),
        (["Val-Loss", "n_layers", "seed"], None, None, ("n_layers", "Val-Loss")),
        (["depth", "perplexity"], None, None, ("depth", "perplexity")),
        (["width", "loss"], None, None, ("width", "loss")),
        (["width", "score"], "width", None, ("width", "score")),
        (["a", "b", "loss"], "b", None, ("b", "loss")),
        (["depth", "train_loss", "test_loss"], None, "train_loss", ("depth", "train_loss")),
    ],
)
def test_columns_are_guessed_where_that_is_clear(names, x, y, chosen):
    assert choose_columns(names, x, y) == chosen


@pytest.mark.parametrize(
    ("names", "x", "y", "words"),
    [
        (["a", "b"], None, None, "which column is the depth"),
        (["depth", "layers", "loss"], None, None, "which column is the depth"),
        (["depth", "test_loss", "val_loss"], None, None, "which column is the loss"),
        (["depth", "a", "b"], None, None, "name it with --y"),
        (["depth", "loss"], "width", None, r"--x must name a column of the table \(depth, loss\), got 'width'"),
        (["depth", "loss"], "loss", "loss", "two columns"),
    ],
)
def test_other_columns_must_be_named(names, x, y, words):
    with pytest.raises(DomainError, match=words):
        choose_columns(names, x, y)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("depth,loss\n", "no rows"),
        ("1,0.5\n2,0.4\n", "must name the columns"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "neither a Parquet file nor text"),
        (b"depth,loss\n1\x00,2\n", "neither a Parquet file nor text"),
        (b"PAR1 and then nothing", "no complete Parquet file"),
        ("depth,loss,loss\n1,2,3\n", "more than once"),
        ('"depth,loss\n1,2\n', "open quotation mark"),
        ("depth\n1\n2\n", "which column is the loss"),
        ("d" * 200_000 + ",loss\n1,2\n", "header of .* is no line of column names"),
    ],
)
def test_unreadable_files_are_one_sentence(tmp_path, content, words):
    with pytest.raises(DomainError, match=words):
        read_losses(written(tmp_path, content))


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = tmp_path / "losses.parquet"
    pd.DataFrame({"depth": DEPTHS, "loss": LOSSES}).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DomainError, match="no complete Parquet file"):
        read_losses(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DomainError, match=r"must be readable.*No such file"):
        read_losses(tmp_path / "nowhere.csv")
    with pytest.raises(DomainError, match=r"must be readable.*directory"):
        read_losses(tmp_path)


def test_quoted_cells_and_numbers_of_python_only(tmp_path):
    data = read_losses(written(tmp_path, '"depth","loss"\n"1","1.0"\n"4","6e-1"\n'))
    assert data.losses.tolist() == [1.0, 0.6]
    with pytest.raises(DomainError, match="'1_000' is not a number"):
        read_losses(written(tmp_path, "depth,loss\n1_000,1.0\n"))
