import re
from pathlib import Path

from dflash_lightning.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def test_ci_runs_the_two_commands() -> None:
    two = re.search(r"## Two commands\n\n```sh\n(make \w+).*\n(make \w+).*\n```", README)
    assert two is not None
    for command in two.groups():
        assert re.search(rf"^{command}\b", CI, re.MULTILINE), f".ci/run does not run `{command}`"


def test_quickstart_is_what_the_readme_says() -> None:
    command = "python -m dflash_lightning fit -c experiments/quickstart.yaml"
    assert command in README
    assert f"$(BIN)/{command} $(FLAGS)" in MAKEFILE


def test_installs_go_through_the_constraints() -> None:
    installs = [line for line in MAKEFILE.splitlines() if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line or "--no-deps" in line for line in installs)


def test_flags_in_the_readme_exist(tmp_path: Path) -> None:
    flags = set(re.findall(r"--((?:model|data|decode|trainer)\.[\w.]+) ", README))
    assert len(flags) >= 5
    cli = main(
        ["--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path)], run=False
    )
    dumped = cli.parser.dump(cli.config, format="json", skip_none=False)
    known = set(dumped.split('"')) | {"train", "url"}
    for flag in flags:
        assert flag.split(".")[-1] in known, f"README names an unknown flag --{flag}"


def test_keys_in_the_readme_exist(tmp_path: Path) -> None:
    table = README.split("| key | what it is |")[1].split("\n\n")[0]
    cli = main(
        ["--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path)], run=False
    )
    for key in re.findall(r"^\| `((?:model|data)\.[\w.]+)`", table, re.MULTILINE):
        assert key in cli.config, key


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_python_example_names_exist() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    imports = "\n".join(
        line for line in example.splitlines() if line.startswith(("import", "from"))
    )
    exec(imports, {})
