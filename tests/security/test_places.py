"""Nothing is obeyed that another user of the machine could have written: settings, stores, modules.

Most tests give files to other users and act as them, which only root can do; they run in a child
process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from omniq.errors import OmniqError, SettingsError, StorageRefused
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.testing.builders import a_task
from omniq.text.masking import mask_text, mask_url

VICTIM, ATTACKER = 23_456, 12_345
"""Neither has an entry in the list of users; the first group of each has the same number."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach, with a name that a shell would take apart."""
    outer = Path(tempfile.mkdtemp(prefix="omniq places"))
    outer.chmod(0o755)
    inner = outer / "it's $(a) folder"
    inner.mkdir(mode=0o755)
    yield inner
    shutil.rmtree(outer)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own, which may become another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"failed: {error!r}"
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def act_as(user: int, work: Callable[[], Any]) -> Any:
    """Call `work` as another user, in a process that is root."""
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        return work()
    finally:
        os.seteuid(0)
        os.setegid(0)


class Facts(NamedTuple):
    """Who owns a file or folder, and who may write to it."""

    owner: int
    group: int
    mode: int

    def give(self, path: Path) -> None:
        os.chown(path, self.owner, self.group)
        path.chmod(self.mode)

    @property
    def is_open_to_others(self) -> bool:
        """Whether somebody but the victim and root may write, said once more and more simply."""
        by_group = bool(self.mode & 0o020) and self.group != VICTIM
        return self.owner == ATTACKER or bool(self.mode & 0o002) or by_group

    @property
    def keeps_entries(self) -> bool:
        """Whether others may add entries, but not replace those of the victim and of root."""
        return bool(self.mode & 0o1000) and self.owner != ATTACKER


def every_facts(modes: tuple[int, ...]) -> list[Facts]:
    owners, groups = (VICTIM, 0, ATTACKER), (VICTIM, ATTACKER)
    return [Facts(*each) for each in product(owners, groups, modes)]


FILES = every_facts((0o644, 0o664, 0o646))
FOLDERS = every_facts((0o755, 0o775, 0o777, 0o1777))
ABOVE = every_facts((0o755, 0o775, 0o777, 0o1777))


def load_everywhere(inner: Path, name: str) -> list[str]:
    """Load the settings of a file as the victim, with all owners and modes; returns what is wrong."""
    wrong = []
    text = {"omniq.toml": "lease = 7\n", "pyproject.toml": "[tool.omniq]\nlease = 7\n"}[name]
    (inner / name).write_text(text)
    os.chdir(inner)

    def is_taken() -> bool:
        try:
            return Settings.load().lease == 7
        except SettingsError:
            return False

    # Each place alone against all others that are safe, and all pairs of file and folder.
    safe = Facts(VICTIM, VICTIM, 0o644), Facts(VICTIM, VICTIM, 0o755), Facts(0, 0, 0o755)
    cases = {(file, folder, safe[2]) for file, folder in product(FILES, FOLDERS)}
    cases |= {(safe[0], folder, above) for folder, above in product(FOLDERS, ABOVE)}
    for file, folder, above in sorted(cases):
        above.give(inner.parent)
        folder.give(inner)
        file.give(inner / name)
        is_safe = not (
            file.is_open_to_others
            or folder.is_open_to_others
            or (above.is_open_to_others and not above.keeps_entries)
        )
        if act_as(VICTIM, is_taken) != is_safe:
            wrong.append(f"{file} in {folder} below {above}: expected {is_safe}")
    return wrong


@as_root
@pytest.mark.security("S41")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["omniq.toml", "pyproject.toml"])
def test_settings_are_taken_exactly_if_no_other_user_could_have_written_them(place, name):
    assert in_child(lambda: load_everywhere(place, name)) == []


@pytest.mark.security("S41")
def test_a_file_of_another_project_in_an_open_folder_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')

    assert Settings.load().lease == 30


@pytest.mark.security("S42")
@pytest.mark.parametrize("by", ["variable", "option"])
def test_a_settings_file_that_is_named_is_taken_from_anywhere(by, tmp_path):
    tmp_path.chmod(0o777)
    named = tmp_path / "production.toml"
    named.write_text("lease = 7\n")
    named.chmod(0o666)
    (tmp_path / "omniq.toml").write_text("lease = 8\n")
    options = ["--config", str(named)] if by == "option" else []
    variables = {"OMNIQ_CONFIG": str(named)} if by == "variable" else {}

    (tmp_path / "own").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    ran = run_omniq(["doctor", *options, "--json"], tmp_path, **variables)

    settings = {each["name"]: each for each in json.loads(ran.stdout)["settings"]}
    assert settings["lease"] == {"name": "lease", "value": "7.0", "source": str(named)}


@pytest.mark.security("S42")
def test_a_named_file_that_does_not_exist_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIQ_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(SettingsError, match="there is no such file"):
        Settings.load()


@pytest.mark.security("S42")
@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_settings_file_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "omniq.toml")
    with pytest.raises(SettingsError, match="not a file"):
        Settings.load()


@pytest.mark.security("S42")
@pytest.mark.parametrize("line", ['signing_key = "k"', 'url = "redis://me:secret@host/0"'])
def test_a_file_with_secrets_that_others_may_read_causes_a_warning(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "omniq.toml"
    path.write_text(line)
    path.chmod(0o644)
    with pytest.warns(UserWarning, match=r"chmod go-r omniq\.toml"):
        Settings.load()

    path.chmod(0o600)
    Settings.load()


def run_omniq(
    arguments: list[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("OMNIQ_")}
    return subprocess.run(
        [sys.executable, "-m", "omniq", *arguments],
        cwd=folder, env={**own, **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


URLS = {"sqlite": "sqlite:///{}/store.db?durability=os", "file": "file://{}?durability=os"}
SIDE_FILES = [
    database + log for database, log in product(("", "-leases"), ("", "-wal", "-shm", "-journal"))
]


async def opened(url: str, **options: Any) -> str:
    """Empty if the store can be opened, else why it is refused."""
    try:
        async with open_storage(url, **options) as storage:
            await storage.enqueue(a_task())
    except StorageRefused as error:
        return str(error)
    return ""


@pytest.mark.security("S43")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o1707])
@pytest.mark.parametrize("kind", URLS)
async def test_a_store_in_a_folder_that_others_may_write_to_is_refused(kind, mode, tmp_path):
    folder = tmp_path / "store"
    url = URLS[kind].format(folder)
    assert await opened(url) == ""
    folder.chmod(mode)

    refusal = await opened(url)

    assert "may write to it" in refusal


@pytest.mark.security("S43")
@pytest.mark.parametrize("kind", URLS)
async def test_a_store_below_a_folder_that_others_may_change_is_refused(kind, tmp_path):
    above = tmp_path / "above"
    url = URLS[kind].format(above / "store")
    assert await opened(url) == ""

    above.chmod(0o777)
    refusal = await opened(url)
    above.chmod(0o1777)
    in_a_temporary_folder = await opened(url)

    assert str(above) in refusal
    assert in_a_temporary_folder == ""


def harm_mode(path: Path) -> None:
    path.touch(exist_ok=True)
    path.chmod(0o666)


def harm_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/null")


def harm_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)


def harm_owner(path: Path) -> None:
    path.touch(exist_ok=True)
    os.chown(path, ATTACKER, ATTACKER)


def harm_group(path: Path) -> None:
    path.touch(exist_ok=True)
    path.chmod(0o660)
    os.chown(path, 0, ATTACKER)


@pytest.mark.security("S43")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "harm",
    [
        harm_mode,
        harm_link,
        harm_pipe,
        pytest.param(harm_owner, marks=as_root),
        pytest.param(harm_group, marks=as_root),
    ],
)
async def test_every_file_that_sqlite_would_read_is_checked_before_it_is_read(harm, tmp_path):
    accepted = []
    for suffix in SIDE_FILES:
        folder = tmp_path / f"store{suffix}"
        url = URLS["sqlite"].format(folder)
        assert await opened(url) == ""
        harm(folder / f"store.db{suffix}")
        if not await opened(url):
            accepted.append(suffix)

    assert accepted == []


@pytest.mark.security("S43")
async def test_folders_that_a_store_creates_are_for_its_user_only(tmp_path):
    before = os.umask(0)
    try:
        for kind, url in URLS.items():
            assert await opened(url.format(tmp_path / kind / "a" / "b")) == ""
    finally:
        os.umask(before)

    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_dir()}
    assert modes == {0o700}


@as_root
@pytest.mark.security("S44")
async def test_a_log_that_another_user_plants_beside_a_store_is_not_replayed(place):
    """The other user can neither read nor write the database, but may add files to its folder."""
    folder = place / "shared"
    url = URLS["sqlite"].format(folder)
    assert await opened(url) == ""
    before = (folder / "store.db").read_bytes()
    folder.chmod(0o1777)
    forged = place / "forged.db"
    with sqlite3.connect(forged) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE planted (x)")
        connection.commit()
        shutil.copy(f"{forged}-wal", folder / "store.db-wal")
    connection.close()
    os.chown(folder / "store.db-wal", ATTACKER, ATTACKER)

    in_open_folder = await opened(url)
    folder.chmod(0o700)
    in_own_folder = await opened(url)

    assert "may write to it" in in_open_folder
    assert f"store.db-wal: belongs to another user (uid {ATTACKER})" in in_own_folder
    assert (folder / "store.db").read_bytes() == before


@as_root
@pytest.mark.security("S45")
@pytest.mark.parametrize("kind", URLS)
async def test_a_link_of_another_user_on_the_path_of_a_store_is_not_followed(kind, place):
    """In a temporary folder another user may add a link; what it leads to may be the victim's."""
    real = place / "real"
    assert await opened(URLS[kind].format(real)) == ""
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "link"
    link.symlink_to(place)
    own_link = await opened(URLS[kind].format(link / "real"))
    os.chown(link, ATTACKER, ATTACKER, follow_symlinks=False)
    foreign_link = await opened(URLS[kind].format(link / "real"))

    assert own_link == ""
    assert f"{link}: belongs to another user" in foreign_link


@pytest.mark.security("S45")
async def test_links_that_lead_in_a_circle_are_an_error_and_no_hang(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OmniqError):
        async with open_storage(URLS["sqlite"].format(tmp_path / "a" / "x")):
            pass


@as_root
@pytest.mark.security("S46")
@pytest.mark.parametrize("kind", URLS)
async def test_root_opens_a_store_of_another_user_only_if_the_settings_say_so(kind, place):
    folder = place / "store"
    url = URLS[kind].format(folder)
    assert await opened(url) == ""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER)

    refusal = await opened(url)
    allowed = await opened(url, settings=Settings(root_opens_any_store=True))

    assert f"belongs to another user (uid {ATTACKER})" in refusal
    assert "OMNIQ_ROOT_OPENS_ANY_STORE=true" in refusal
    assert allowed == ""


@pytest.mark.security("S47")
@pytest.mark.timeout(120)
@pytest.mark.deep_on("one")
@pytest.mark.parametrize("start", [[], ["--processes", "2"]], ids=["one", "two"])
def test_a_file_in_the_current_folder_does_not_take_the_place_of_a_package(start, tmp_path):
    """All names that a worker imports, each as a file that would leave a mark if it was imported."""
    names = imported_packages()
    assert {"uvloop", "msgspec", "json", "sqlite3"} <= set(names)
    for name in names:
        (tmp_path / f"{name}.py").write_text("open('imported', 'a').write(__name__ + '\\n')\n")
    (tmp_path / "chores.py").write_text(
        "import helper\nfrom omniq import task\n\n@task\ndef run():\n    return helper.WORD\n"
    )
    (tmp_path / "helper.py").write_text("WORD = 'found'\n")

    ran, worker = run_worker(tmp_path, "chores", start)

    assert ran == "found"
    assert f"runs=chores ({tmp_path}/chores.py)" in worker
    assert not (tmp_path / "imported").exists()


@pytest.mark.security("S47")
@pytest.mark.timeout(120)
def test_with_pythonsafepath_only_the_named_module_comes_from_the_current_folder(tmp_path):
    (tmp_path / "chores.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("open('imported', 'w')\n")

    ran = run_script(["worker", "chores"], tmp_path, PYTHONSAFEPATH="1")

    assert ran.returncode == 2
    assert "No module named 'helper'" in ran.stderr
    assert not (tmp_path / "imported").exists()


def imported_packages() -> list[str]:
    """The top-level names that a worker with all its parts has imported, omniq's own excepted."""
    program = (
        "import sys; before = set(sys.modules); import omniq.cli.app, omniq.worker.pool_runtime, "
        "omniq.storage.sqlite, omniq.worker.process.supervisor, uvloop; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [name for name in ran.stdout.split() if name not in ("omniq", "__mp_main__")]


def run_worker(folder: Path, module: str, start: list[str]) -> tuple[Any, str]:
    """Enqueue `run` of the module and let a worker run it; returns the result and what it wrote."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("OMNIQ_")}
    worker = subprocess.Popen(
        [str(Path(sys.executable).with_name("omniq")), "worker", module, *start],
        cwd=folder, env=own, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        shown = run_script(["enqueue", f"{module}.run", "--wait", "60s", "--json"], folder)
    finally:
        worker.terminate()
        _, text = worker.communicate(timeout=60)
    return json.loads(shown.stdout)["result"], text + shown.stderr


def run_script(
    arguments: list[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed program, to which Python adds no folder of the user."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("OMNIQ_")}
    return subprocess.run(
        [str(Path(sys.executable).with_name("omniq")), *arguments],
        cwd=folder, env={**own, **variables}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


SECRET = "Kx9vQ7"
PASSWORDS = [
    *(SECRET + mark + "Zt4mW2" for mark in string.punctuation + " "),
    *(mark + SECRET for mark in "/#?@:[]%"),
    *(f"12{mark}{SECRET}" for mark in "/#?@:[]"),
    f"1/{SECRET}?{SECRET}#{SECRET}@{SECRET}",
]
"""Unquoted, as people paste them."""

TEMPLATES = [
    "postgresql://me:{}@127.0.0.1:1/db",
    "postgresql://me:{}@127.0.0.1:1/db?sslmode=disable",
    "postgresql://:{}@127.0.0.1:1",
    "postgresql:me:{}@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?user=me&password={}",
    "redis://me:{}@127.0.0.1:1/0",
    "redis://:{}@127.0.0.1:1",
    "redis:me:{}@127.0.0.1:1/0",
    "rediss://me:{}@127.0.0.1:1/0?ssl_cert_reqs=none",
    "redis://127.0.0.1:1/0?password={}",
    "mysql://me:{}@127.0.0.1:1/db",
]


@pytest.mark.security("S48")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_no_error_shows_any_part_of_a_password_whatever_characters_it_has(template):
    shown = {}
    for password in PASSWORDS:
        url = template.format(password)
        texts = [mask_url(url), mask_text(f"cannot reach {url}")]
        try:
            async with open_storage(url):
                pass
        except OmniqError as error:
            texts += [str(each) for each in chain(error)]
        if any(part in text for text in texts for part in (SECRET, "Zt4mW2")):
            shown[password] = texts

    assert shown == {}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.security("S48")
@pytest.mark.parametrize("port", ["0", "65536", "99999", "9" * 40, "-1", "²"])
@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
async def test_a_port_that_cannot_be_is_a_settings_error(scheme, port):
    with pytest.raises(SettingsError, match="port"):
        async with open_storage(f"{scheme}://127.0.0.1:{port}/0"):
            pass


KEYS = ("OMNIQ_SIGNING_KEY", "OMNIQ_ENCRYPTION_KEY", "OMNIQ_OLD_KEYS")


@pytest.mark.security("S49")
@pytest.mark.parametrize("text", ["", " ", "\t\n", "\u00a0"])
@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_is_set_and_empty_is_an_error(name, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, text)
    for other in KEYS:
        if other != name:
            monkeypatch.setenv(other, "a real secret")
    with pytest.raises(SettingsError, match=name):
        Settings.load()


@pytest.mark.security("S49")
@pytest.mark.parametrize("field", ["signing_key", "encryption_key", "old_keys"])
def test_a_blank_key_is_an_error_in_code_too(field):
    with pytest.raises(SettingsError, match=field):
        Settings.load(**{field: " "})


@pytest.mark.security("S49")
def test_old_keys_alone_and_a_demanded_key_that_is_missing_are_errors():
    with pytest.raises(SettingsError, match="old_keys without a key"):
        Settings(old_keys="former")
    with pytest.raises(SettingsError, match="require_key"):
        Settings(require_key=True)
    assert Settings(require_key=True, signing_key="k").signing_key == "k"


@pytest.mark.security("S49")
@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({}, "open"),
        ({"OMNIQ_SIGNING_KEY": "s" * 20}, "signed"),
        ({"OMNIQ_ENCRYPTION_KEY": "e" * 20}, "encrypted"),
    ],
)
def test_doctor_says_whether_records_are_signed_encrypted_or_open(variables, word, tmp_path):
    ran = run_omniq(["doctor"], tmp_path, **variables)

    assert re.search(rf"records +{word}", ran.stdout), ran.stdout + ran.stderr


def mend(refusal: str, folder: Path) -> None:
    """Run the command that the refusal advises, as a user would: copied into a shell."""
    command = re.search(r"; (?:if it should be yours, )?run (.*?)(?:, or |$)", refusal)
    assert command is not None, refusal
    subprocess.run(["sh", "-c", command[1]], cwd=folder, check=True)


@as_root
@pytest.mark.security("S50")
@pytest.mark.parametrize("harm", [harm_mode, harm_owner, harm_group])
@pytest.mark.parametrize("what", ["folder", "database", "log"])
async def test_the_command_in_a_refusal_mends_a_store(harm, what, place):
    folder = place / "store"
    url = URLS["sqlite"].format(folder)
    assert await opened(url) == ""
    target = {"folder": folder, "database": folder / "store.db", "log": folder / "store.db-wal"}
    harm(target[what])
    if what == "folder":
        folder.chmod(folder.stat().st_mode | 0o700)

    for _ in range(2):
        if refusal := await opened(url):
            mend(refusal, place)

    assert await opened(url) == ""


@as_root
@pytest.mark.security("S50")
@pytest.mark.parametrize("harm", [harm_mode, harm_owner, harm_group])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_the_command_in_a_refusal_mends_a_settings_file(harm, what, place, monkeypatch):
    monkeypatch.chdir(place)
    path = place / "omniq.toml"
    path.write_text("lease = 7\n")
    harm(path if what == "file" else place)
    place.chmod(place.stat().st_mode | 0o700)
    with pytest.raises(SettingsError) as refused:
        Settings.load()

    mend(str(refused.value), place)

    assert Settings.load().lease == 7
