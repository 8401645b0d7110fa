"""A function has one path, a path leads to one function, and not every function may run."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask
from omniq.tasks.functions import FunctionCache, options_of, path_of, resolve, task

HERE = __name__


def plain(a: int, b: int) -> int:
    return a + b


@task
async def marked(a: int) -> int:
    return a


@task(queue="mail", max_retries=5, timeout=30)
def with_options(to: str) -> str:
    return to


class Holder:
    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> None: ...

    def method(self) -> None: ...

    class Inner:
        @staticmethod
        def deep() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


def wrapped(func: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(func)
    def wrapper(*args: object) -> object:
        return func(*args)

    return wrapper


@wrapped
def decorated() -> str:
    return "decorated"


@functools.lru_cache
def memoized() -> None: ...


in_a_variable = lambda: None  # noqa: E731  # a lambda with a name is what is refused here
of_the_standard_library = shutil.rmtree
json_module = json


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module, importable for this test only."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


class TestTask:
    def test_a_marked_function_is_the_same_function(self):
        assert inspect.iscoroutinefunction(marked)
        assert with_options("you") == "you"
        assert with_options.__name__ == "with_options"

    def test_options_are_stored_with_the_function(self):
        assert options_of(with_options).given() == {
            "queue": "mail",
            "max_retries": 5,
            "timeout": 30.0,
        }

    def test_a_function_without_task_has_no_options(self):
        assert options_of(marked).given() == {}
        assert options_of(plain).given() == {}

    def test_invalid_options_fail_at_the_definition(self):
        with pytest.raises(InvalidTask, match="max_retries"):
            task(max_retries=-1)

    @pytest.mark.parametrize(
        "func",
        [
            Holder,
            print,
            functools.partial(plain, 1),
            Holder().method,
            generator,
            staticmethod(plain),
            5,
        ],
    )
    def test_a_callable_that_can_never_run_cannot_be_marked(self, func):
        with pytest.raises(InvalidTask, match="@task on"):
            task(func)

    def test_a_function_inside_a_function_cannot_be_marked(self):
        with pytest.raises(InvalidTask, match="move it to the top"):

            @task
            def inner() -> None: ...


class TestPathOf:
    def test_a_function_is_its_module_and_its_name(self):
        assert path_of(plain) == f"{HERE}.plain"
        assert path_of(marked) == f"{HERE}.marked"

    def test_a_static_method_has_the_class_in_its_path(self):
        assert path_of(Holder.static) == f"{HERE}.Holder.static"
        assert path_of(Holder.Inner.deep) == f"{HERE}.Holder.Inner.deep"

    def test_a_decorator_that_uses_wraps_does_not_change_the_path(self):
        assert path_of(decorated) == f"{HERE}.decorated"

    def test_a_path_stays_as_it_is(self):
        assert path_of("pkg.mod.func") == "pkg.mod.func"

    @pytest.mark.parametrize(
        "bad", ["", "func", ".f", "a.", "a..b", "a b.c", "1a.b", "a-b.c", "a.b()", "a.b\n"]
    )
    def test_text_that_is_not_a_path_is_refused(self, bad):
        with pytest.raises(InvalidTask, match="dotted path"):
            path_of(bad)

    @pytest.mark.parametrize(
        ("func", "advice"),
        [
            (lambda: None, "lambda"),
            (in_a_variable, "lambda"),
            (Holder.method, "not a static method"),
            (Holder().method, "bound to an object"),
            (Holder.of_class, "bound to an object"),
            (print, "builtin"),
            (len, "builtin"),
            (Holder, "class"),
            (functools.partial(plain, 1), "partial"),
            (memoized, "not a function"),
            (generator, "generator"),
            (async_generator, "generator"),
            (shutil.rmtree, "one of your functions"),
            (None, "not a function"),
        ],
    )
    def test_a_function_that_a_worker_could_not_find_or_run_is_refused_with_advice(
        self, func, advice
    ):
        with pytest.raises(InvalidTask, match=advice):
            path_of(func)

    def test_a_function_inside_a_function_is_refused(self):
        def inner() -> None: ...

        with pytest.raises(InvalidTask, match="inside a function"):
            path_of(inner)

    def test_a_function_whose_name_leads_elsewhere_is_refused(self, monkeypatch):
        original = plain
        monkeypatch.setitem(globals(), "plain", marked)

        with pytest.raises(InvalidTask, match="a different object"):
            path_of(original)

    def test_a_function_whose_name_is_gone_is_refused(self, monkeypatch):
        original = plain
        monkeypatch.delitem(globals(), "plain")

        with pytest.raises(InvalidTask, match="has no plain"):
            path_of(original)


class TestMain:
    SCRIPT = (
        "from omniq.tasks.functions import path_of, resolve\n"
        "def send(): ...\n"
        "if __name__ == '__main__':\n"
        "    path = path_of(send)\n"
        "    print(path, resolve(path) is send, flush=True)\n"
    )

    def run(self, folder: Path, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout + done.stderr

    def test_a_function_of_a_script_has_the_scripts_name(self, tmp_path):
        (tmp_path / "mailer.py").write_text(self.SCRIPT)

        assert self.run(tmp_path, "mailer.py") == "mailer.send True\n"

    def test_a_function_of_a_module_that_is_run_has_the_modules_name(self, tmp_path):
        (tmp_path / "shop").mkdir()
        (tmp_path / "shop" / "mailer.py").write_text(self.SCRIPT)

        assert self.run(tmp_path, "-m", "shop.mailer") == "shop.mailer.send True\n"

    def test_a_script_that_runs_its_own_function_is_not_run_twice(self, tmp_path):
        (tmp_path / "mailer.py").write_text("print('top')\n" + self.SCRIPT)

        assert self.run(tmp_path, "mailer.py") == "top\nmailer.send True\n"

    @pytest.mark.parametrize("name", ["my-script.py", "shop/__main__.py"])
    def test_the_error_about_a_script_that_cannot_be_imported_says_to_use_a_module(
        self, tmp_path, name
    ):
        (tmp_path / "shop").mkdir()
        (tmp_path / name).write_text(self.SCRIPT)
        arguments = ("-m", "shop") if "/" in name else (name,)

        assert "move the function to a module" in self.run(tmp_path, *arguments)

    def test_a_function_typed_into_the_interpreter_is_told_to_use_a_module(self, tmp_path):
        message = self.run(tmp_path, "-", text=self.SCRIPT)

        assert "move the function to a module" in message


class TestResolve:
    @pytest.mark.parametrize(
        "func", [plain, marked, with_options, Holder.static, Holder.Inner.deep, decorated]
    )
    def test_a_path_leads_back_to_its_function(self, func):
        assert resolve(path_of(func)) is func

    def test_a_module_is_imported_when_it_is_needed(self, write_module):
        write_module("shop_a.mail.tasks", "def send():\n    return 'sent'\n")

        assert resolve("shop_a.mail.tasks.send")() == "sent"

    def test_a_path_is_resolved_once(self, write_module):
        write_module("shop_b", "def send(): ...\n")
        cache = FunctionCache()
        first = cache.resolve("shop_b.send")
        del sys.modules["shop_b"]

        assert cache.resolve("shop_b.send") is first
        assert "shop_b" not in sys.modules

    def test_a_missing_module_may_exist_on_another_worker(self, write_module):
        write_module("shop_c.mail", "def send(): ...\n")

        for path in ("no_such_module_c.f", "shop_c.other.f"):
            with pytest.raises(FunctionNotFound, match="no module") as caught:
                resolve(path)
            assert caught.value.elsewhere
            assert not isinstance(caught.value, ForbiddenFunction)

    def test_a_missing_name_may_exist_in_another_version_of_the_module(self):
        for name in ("gone", "Gone.static", "Holder.gone"):
            with pytest.raises(FunctionNotFound) as caught:
                resolve(f"{HERE}.{name}")
            assert caught.value.elsewhere
            assert caught.value.why in str(caught.value)

    @pytest.mark.parametrize(
        "text", ["raise LookupError('at the top')", "import sys; sys.exit(3)", "def broken(:"]
    )
    def test_a_module_that_cannot_be_imported_is_named_with_its_error(self, write_module, text):
        write_module("shop_d", text)

        with pytest.raises(FunctionNotFound, match="importing shop_d failed") as caught:
            resolve("shop_d.send")
        assert not caught.value.elsewhere

    def test_a_module_with_a_missing_dependency_is_not_a_missing_module(self, write_module):
        write_module("shop_e", "import no_such_module_e\n")

        with pytest.raises(FunctionNotFound, match="importing shop_e failed") as caught:
            resolve("shop_e.send")
        assert not caught.value.elsewhere

    @pytest.mark.parametrize(
        "path",
        [
            "os.system",
            "posix.system",
            "subprocess.run",
            "builtins.eval",
            "importlib.import_module",
            "ctypes.CDLL",
            "pickle.loads",
            "shutil.rmtree",
            "timeit.timeit",
            "runpy.run_path",
            "sys.exit",
            "pip.main",
            "tests.__init__.f",
            f"{HERE}.__builtins__.eval",
            f"{HERE}.plain.__globals__",
            f"{HERE}.Holder.__init__",
            f"{HERE}.of_the_standard_library",
            f"{HERE}.Holder",
            f"{HERE}.memoized",
            f"{HERE}.generator",
            f"{HERE}.json_module",
            "not a path",
            "",
        ],
    )
    def test_a_path_that_is_never_a_task_is_refused_with_any_allow_list(self, path):
        with pytest.raises(ForbiddenFunction) as caught:
            resolve(path, allow=[path, path.partition(".")[0], HERE])
        assert not caught.value.elsewhere

    @pytest.mark.parametrize("name", ["json_module.dumps", "os.system", "Holder.method"])
    def test_imported_names_of_a_module_cannot_be_run(self, name):
        with pytest.raises(FunctionNotFound):
            resolve(f"{HERE}.{name}")

    def test_refusing_a_path_imports_nothing(self):
        sys.modules.pop("antigravity", None)

        with pytest.raises(ForbiddenFunction):
            resolve("antigravity.geohash")
        assert "antigravity" not in sys.modules


class TestAllow:
    def test_paths_under_a_prefix_are_allowed(self):
        assert resolve(f"{HERE}.plain", allow=[HERE]) is plain
        assert resolve(f"{HERE}.plain", allow=["tests"]) is plain
        assert resolve(f"{HERE}.plain", allow=[f"{HERE}.plain"]) is plain

    def test_a_prefix_ends_at_a_dot(self, write_module):
        write_module("shop_f_evil", "def f(): ...\n")

        with pytest.raises(ForbiddenFunction):
            resolve("shop_f_evil.f", allow=["shop_f"])

    def test_a_path_outside_is_refused_without_an_import_and_may_run_on_another_worker(
        self, write_module
    ):
        write_module("shop_g.inside", "def f(): ...\n")
        write_module("shop_g.outside", "def f(): ...\n")
        cache = FunctionCache(allow=["shop_g.inside"])

        with pytest.raises(ForbiddenFunction, match=r"only functions of shop_g\.inside") as caught:
            cache.resolve("shop_g.outside.f")
        assert caught.value.elsewhere
        assert not any(name.startswith("shop_g") for name in sys.modules)

    def test_a_function_that_an_allowed_module_imported_is_refused(self, write_module):
        write_module("shop_h_library", "def wipe(): ...\n")
        write_module("shop_h", "from shop_h_library import wipe\n")

        assert resolve("shop_h.wipe").__module__ == "shop_h_library"
        with pytest.raises(ForbiddenFunction, match="comes from shop_h_library"):
            resolve("shop_h.wipe", allow=["shop_h"])

    def test_an_empty_list_allows_nothing(self):
        with pytest.raises(ForbiddenFunction, match="no module"):
            resolve(f"{HERE}.plain", allow=[])

    def test_a_single_text_is_not_a_list_of_characters(self):
        with pytest.raises(InvalidTask, match="list of prefixes"):
            FunctionCache(allow="tests")
