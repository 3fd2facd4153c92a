"""The README's Python runs, in the order in which it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_python_blocks_of_the_readme_run_one_after_another(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    # The two tables that `describe` prints on the way.
    assert "total: 1 matrix, 1 vector, 0 frozen" in capsys.readouterr().out
    assert namespace["train_state"].step == 1
    assert float(namespace["loss"](namespace["params"], namespace["x"], namespace["y"])) < 0.5


def test_links_of_the_readme_lead_to_files():
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", README.read_text())
    assert targets
    for target in targets:
        assert (README.parent / target).exists(), target
