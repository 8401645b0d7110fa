"""Settings are found from a folder below them, and an unknown variable causes a warning."""

from __future__ import annotations

import os

import pytest

from omniq.errors import SettingsError
from omniq.settings import Settings
from omniq.storage.urls import local_path, open_storage, storage_url


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "src" / "app").mkdir(parents=True)
    monkeypatch.chdir(folder / "src" / "app")
    for name in [name for name in os.environ if name.startswith("OMNIQ_")]:
        monkeypatch.delenv(name)
    return folder


def where(settings: Settings) -> str:
    path = local_path(storage_url(settings))
    assert path is not None
    return str(path.absolute())


@pytest.mark.parametrize(
    ("file", "text"),
    [("omniq.toml", "lease = 7"), ("pyproject.toml", "[tool.omniq]\nlease = 7")],
)
def test_settings_are_found_from_a_folder_below(project, file, text):
    (project / file).write_text(text)
    settings = Settings.load()
    assert settings.lease == 7
    assert settings.sources["lease"] == str(project / file)
    assert where(settings) == str(project / ".omniq" / "omniq.db")


@pytest.mark.parametrize("mark", ["pyproject.toml", ".git"])
def test_the_search_ends_at_the_first_project(project, tmp_path, mark):
    (tmp_path / "omniq.toml").write_text("lease = 7")
    (project / mark).touch()
    settings = Settings.load()
    assert settings.lease == 30
    assert where(settings) == str(project / ".omniq" / "omniq.db")


def test_without_a_project_the_default_storage_is_in_the_current_folder(project):
    assert where(Settings.load()) == str(project / "src" / "app" / ".omniq" / "omniq.db")


def test_the_search_does_not_go_above_the_home_folder(project, tmp_path, monkeypatch):
    (tmp_path / "omniq.toml").write_text("lease = 7")
    monkeypatch.setenv("HOME", str(project))
    assert Settings.load().lease == 30
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings.load().lease == 7


def test_a_folder_that_others_may_write_to_ends_the_search(project, tmp_path):
    """The stranger's file would be refused there, which stops all who work below that folder."""
    (tmp_path / "omniq.toml").write_text("lease = 7")
    project.chmod(0o777)
    assert Settings.load().lease == 30


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_ends_the_search(project):
    (project / "omniq.toml").write_text("lease = 7")
    os.chown(project, 4242, 4242)
    assert Settings.load().lease == 30


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("url = 'sqlite:///data/a b.db'", "data/a b.db"),
        ("url = 'sqlite:tasks.db?durability=os'", "tasks.db"),
        ("url = 'file:data'", "data"),
        ("url = 'file:'", ".omniq"),
        ("base_dir = 'state'", "state/omniq.db"),
        ("base_dir = 'state'\nurl = 'file:?durability=os'", "state"),
    ],
)
def test_paths_in_a_file_are_relative_to_its_folder(project, monkeypatch, setting, expected):
    (project / "omniq.toml").write_text(setting)
    assert where(Settings.load()) == str(project / expected)
    monkeypatch.chdir(project)
    assert where(Settings.load()) == str(project / expected)


@pytest.mark.parametrize("url", ["sqlite:////srv/tasks.db", "file:///srv/tasks", "file:/srv/tasks"])
def test_absolute_paths_in_a_file_stay(project, url):
    (project / "omniq.toml").write_text(f"url = '{url}'")
    assert where(Settings.load()).startswith("/srv/tasks")


def test_a_path_in_the_environment_is_relative_to_the_current_folder(project, monkeypatch):
    (project / "omniq.toml").write_text("lease = 7")
    monkeypatch.setenv("OMNIQ_URL", "sqlite:///tasks.db")
    assert where(Settings.load()) == str(project / "src" / "app" / "tasks.db")


def test_a_deleted_current_folder_is_no_error(project):
    (project / "src" / "app").rmdir()
    assert Settings.load().lease == 30


def test_an_unknown_variable_causes_a_warning(monkeypatch):
    monkeypatch.setenv("OMNIQ_CONCURENCY", "3")
    with pytest.warns(UserWarning, match=r"OMNIQ_CONCURENCY .* did you mean OMNIQ_CONCURRENCY\?"):
        assert Settings.load().concurrency == Settings().concurrency


def test_a_warning_about_a_variable_names_the_line_of_the_program(monkeypatch):
    monkeypatch.setenv("OMNIQ_CONCURENCY", "3")
    with pytest.warns(UserWarning, match="OMNIQ_CONCURENCY") as caught:
        open_storage("memory://")

    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    "variable",
    [
        "OMNIQ_PORT",
        "OMNIQ_PORT_8080_TCP_ADDR",
        "OMNIQ_SERVICE_HOST",
        "OMNIQ_SERVICE_PORT_HTTP",
        "OMNIQ_DASHBOARD_SERVICE_HOST",
        "OMNIQ_DASHBOARD_PORT_80_TCP",
        "OMNIQ_DASHBOARD_OPERATOR",
        "OMNIQ_TEST_REDIS_URL",
    ],
)
def test_variables_of_others_cause_no_warning(monkeypatch, variable):
    monkeypatch.setenv(variable, "tcp://10.0.0.1:80")
    Settings.load()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("postgresql+asyncpg://me:secret@host/app", r"write postgresql://me:\*\*\*@host/app"),
        ("postgresql+psycopg://host/app", "write postgresql://host/app"),
        ("sqlite+aiosqlite:///tasks.db", "write sqlite:///tasks.db"),
        ("sqlite:/tasks.db", "write sqlite:///tasks.db for .* or sqlite:////tasks.db"),
        ("sqlite://tasks.db", "write sqlite:///tasks.db for"),
        ("mysql+pymysql://host/app", "unknown kind"),
    ],
)
def test_a_url_that_people_write_gets_advice(url, advice):
    with pytest.raises(SettingsError, match=advice) as refusal:
        open_storage(url)
    assert "secret" not in str(refusal.value)


async def test_the_default_folder_is_ignored_by_git(project):
    (project / ".git").mkdir()
    async with open_storage():
        pass
    assert (project / ".omniq" / ".gitignore").read_text() == "*\n"
    (project / ".omniq" / ".gitignore").unlink()
    async with open_storage():
        pass
    assert not (project / ".omniq" / ".gitignore").exists()
