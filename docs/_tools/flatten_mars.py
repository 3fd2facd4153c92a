"""Writes `mars` as one file, out of the package's own functions, in a form to offer to Optax.

    python docs/_tools/flatten_mars.py > _mars.py

Lines `# INLINE file: names` of mars_for_optax.py.in are replaced by those functions, as they stand
in the package, their modules' names removed. What the package adds around them (meshes, kernels,
axes, checks, the exact correction, narrow buffers) stays behind.
"""

import ast
import pathlib
import re

_HERE = pathlib.Path(__file__).resolve().parent
_SOURCES = _HERE.parent.parent / "mars_optax" / "_src"
_DIRECTIVE = re.compile(r"^# INLINE (\S+): (.+)$\n", re.MULTILINE)


def functions(path: pathlib.Path, names: list[str]) -> str:
    """The text of some functions of a file, with their decorators and comments."""
    text = path.read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return "\n\n\n".join(found[name] for name in names)


def flattened() -> str:
    """The text of the file."""
    template = (_HERE / "mars_for_optax.py.in").read_text()
    modules = [pathlib.Path(path).stem for path, _ in _DIRECTIVE.findall(template)]
    text = _DIRECTIVE.sub(
        lambda match: f"\n\n{functions(_SOURCES / match[1], match[2].split())}\n", template
    )
    # A decorator such as `@root.defjvp` is of a function that has its module's name.
    text = re.sub(rf"(?<!@)\b(?:{'|'.join(modules)})\.(?=\w)", "", text)
    return re.sub(r"\n{4,}", "\n\n\n", text)


if __name__ == "__main__":
    print(flattened(), end="")
