"""A function has one path, a path leads to one function, and not every function may run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniq.errors import (
    ForbiddenFunction,
    FunctionNotFound,
    InvalidTask,
    UnmarkedFunctionWarning,
)
from omniq.tasks.functions import (
    FunctionCache,
    options_of,
    pass_to_queue,
    path_of,
    resolve,
    task,
)
from omniq.tasks.passed_functions import PassedFunctions

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

        @staticmethod
        @task
        def marked() -> None: ...


class Lazy:
    """Like Django's settings: every question loads them."""

    def __getattribute__(self, name: str) -> object:
        raise LookupError(name)


lazy = Lazy()


def _private() -> None: ...


alias_of_private = _private


@task
def _private_and_marked() -> None: ...


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

        with pytest.raises(InvalidTask, match=r"inside a function.*functools\.wraps"):
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

    def test_the_error_about_a_script_says_which_name_can_be_imported(self, tmp_path):
        (tmp_path / "my-script.py").write_text(self.SCRIPT)

        assert "rename the file to my_script.py" in self.run(tmp_path, "my-script.py")

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
        cache = FunctionCache(["shop_b"])
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
    def test_a_named_module_has_all_its_public_functions(self):
        for func in (plain, marked, Holder.static, Holder.Inner.deep, decorated):
            assert resolve(path_of(func), allow=[HERE]) is func

    def test_one_function_or_class_may_be_named(self):
        assert resolve(f"{HERE}.plain", allow=[f"{HERE}.plain"]) is plain
        assert resolve(f"{HERE}.Holder.static", allow=[f"{HERE}.Holder"]) is Holder.static
        with pytest.raises(ForbiddenFunction):
            resolve(f"{HERE}.decorated", allow=[f"{HERE}.plain", f"{HERE}.Holder"])

    def test_below_a_named_package_only_marked_functions_are_allowed(self):
        assert resolve(f"{HERE}.marked", allow=["tests"]) is marked
        with pytest.raises(ForbiddenFunction, match="not marked with @task") as caught:
            resolve(f"{HERE}.plain", allow=["tests"])
        assert caught.value.elsewhere

    def test_a_named_module_is_imported_and_none_below_it(self, write_module):
        write_module("shop_i.__init__", "def f(): ...\n")
        write_module("shop_i.below", "from omniq import TaskQueue, task\n@task\ndef f(): ...\n")
        cache = FunctionCache(["shop_i"])

        assert cache.resolve("shop_i.f").__module__ == "shop_i"
        with pytest.raises(FunctionNotFound, match="not imported here; name it"):
            cache.resolve("shop_i.below.f")
        assert "shop_i.below" not in sys.modules

    def test_the_error_of_a_named_module_that_cannot_be_imported_is_the_reason(self, write_module):
        write_module("shop_j", "raise LookupError('at the top')\n")
        cache = FunctionCache(["shop_j", "no_such_module_j"])

        assert [error.func_path for error in cache.import_allowed()] == [
            "shop_j",
            "no_such_module_j",
        ]
        with pytest.raises(FunctionNotFound, match="at the top"):
            cache.resolve("shop_j.f")
        with pytest.raises(FunctionNotFound, match="no module no_such_module_j"):
            cache.resolve("no_such_module_j.f")

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

        for allow in (["shop_h"], ["shop_h", "shop_h_library"], None):
            with pytest.raises(ForbiddenFunction, match="comes from shop_h_library"):
                resolve("shop_h.wipe", allow=allow)

    def test_an_empty_list_allows_nothing(self):
        with pytest.raises(ForbiddenFunction, match="no module"):
            resolve(f"{HERE}.plain", allow=[])

    def test_a_single_text_is_not_a_list_of_characters(self):
        with pytest.raises(InvalidTask, match="list of prefixes"):
            FunctionCache(allow="tests")


class TestWithoutAllow:
    """What a pool runs that was given no modules."""

    def test_a_marked_function_of_an_imported_module_is_allowed(self):
        cache = FunctionCache(passed=PassedFunctions())

        assert cache.resolve(f"{HERE}.marked") is marked
        assert cache.runnable.accepts(f"{HERE}.marked")
        assert cache.runnable.accepts(f"{HERE}.Holder.Inner.marked")
        assert cache.resolve(f"{HERE}.Holder.Inner.marked") is Holder.Inner.marked

    def test_a_plain_function_is_allowed_once_it_was_passed_to_a_queue(self):
        passed = PassedFunctions()
        cache = FunctionCache(passed=passed)
        with pytest.raises(ForbiddenFunction, match="mark it, or name its module") as caught:
            cache.resolve(f"{HERE}.plain")
        assert caught.value.elsewhere
        assert not cache.runnable.accepts(f"{HERE}.plain")

        passed.add(f"{HERE}.plain")
        assert cache.runnable.accepts(f"{HERE}.plain")
        assert cache.resolve(f"{HERE}.plain") is plain

    def test_a_module_is_imported_for_a_path_that_was_passed_and_for_no_other(self, write_module):
        passed = PassedFunctions()
        cache = FunctionCache(passed=passed)
        for name in ("shop_k", "shop_l"):
            write_module(name, "from omniq import task\n@task\ndef f(): ...\n")
        passed.add("shop_k.f")

        assert cache.resolve("shop_k.f").__module__ == "shop_k"
        with pytest.raises(FunctionNotFound, match="not imported here"):
            cache.resolve("shop_l.f")
        assert "shop_l" not in sys.modules

    def test_a_marked_function_counts_as_soon_as_its_module_is_imported(self, write_module):
        cache = FunctionCache(passed=PassedFunctions())
        write_module("shop_m", "from omniq import task\n@task\ndef f(): ...\n")
        assert not cache.runnable.accepts("shop_m.f")

        importlib.import_module("shop_m")
        assert cache.runnable.accepts("shop_m.f")

    def test_a_module_that_is_still_being_imported_is_searched_again(self, write_module):
        cache = FunctionCache(passed=PassedFunctions())
        write_module(
            "shop_n",
            "import sys\nsys.modules['tests'].probe()\n"
            "from omniq import task\n@task\ndef f(): ...\n",
        )
        tests: Any = sys.modules["tests"]
        tests.probe = lambda: cache.runnable
        try:
            importlib.import_module("shop_n")
        finally:
            del tests.probe

        assert cache.runnable.accepts("shop_n.f")

    def test_what_is_marked_later_is_found_by_a_search(self, write_module):
        write_module("shop_o", "def f(): ...\n")
        module: Any = importlib.import_module("shop_o")
        cache = FunctionCache(passed=PassedFunctions())
        module.g = task(module.f)
        module.f = module.g

        cache.refresh()
        assert cache.runnable.accepts("shop_o.f")

    def test_a_module_that_is_loaded_lazily_is_not_loaded_by_the_search(self, write_module):
        write_module("shop_p", "raise LookupError('loaded')\n")
        spec: Any = importlib.util.find_spec("shop_p")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["shop_p"] = module
        spec.loader.exec_module(module)

        assert not FunctionCache(passed=PassedFunctions()).runnable.accepts("shop_p.f")

    def test_objects_that_load_something_when_asked_are_not_asked(self):
        cache = FunctionCache(passed=PassedFunctions())

        assert not cache.runnable.accepts(f"{HERE}.lazy")
        with pytest.raises(ForbiddenFunction, match="not a function but Lazy"):
            cache.resolve(f"{HERE}.lazy")
        with pytest.raises(FunctionNotFound):
            cache.resolve(f"{HERE}.lazy.anything")

    def test_private_names_and_installed_functions_are_refused_even_if_passed(self):
        passed = PassedFunctions()
        cache = FunctionCache(passed=passed)
        paths = [
            f"{HERE}._private",
            f"{HERE}._private_and_marked",
            f"{HERE}.alias_of_private",
            "omniq.testing.builders.a_task",
            "click.termui.edit",
            "os.system",
        ]
        for path in paths:
            passed.add(path)
            with pytest.raises(ForbiddenFunction):
                cache.resolve(path)
        assert not cache.runnable.accepts(f"{HERE}._private")
        assert not cache.runnable.accepts(f"{HERE}._private_and_marked")
        with pytest.raises(ForbiddenFunction):
            resolve(f"{HERE}._private_and_marked", allow=[HERE, f"{HERE}._private_and_marked"])


class TestPassing:
    def test_an_unmarked_function_warns_once(self):
        passed = PassedFunctions()
        sentence = "mark it with @task, or a worker in another process, or after a restart, will not run it"
        with pytest.warns(UnmarkedFunctionWarning, match=re.escape(sentence)) as caught:
            pass_to_queue(plain, f"{HERE}.plain", passed)
        # The line of the function: the call may be in the thread of the synchronous API.
        places = [(warning.filename, warning.lineno) for warning in caught]
        assert places == [(__file__, plain.__code__.co_firstlineno)]
        pass_to_queue(plain, f"{HERE}.plain", passed)

    def test_a_path_warns_like_its_function(self):
        with pytest.warns(UnmarkedFunctionWarning, match="mark it with @task"):
            pass_to_queue(f"{HERE}.plain", f"{HERE}.plain", PassedFunctions())

    @pytest.mark.parametrize("func", [_private, _private_and_marked])
    def test_what_no_worker_runs_warns_with_the_reason(self, func):
        with pytest.warns(UnmarkedFunctionWarning, match="no worker will run .*: names with a"):
            pass_to_queue(func, path_of(func), PassedFunctions())

    def test_a_marked_function_and_an_unknown_path_do_not_warn(self):
        passed = PassedFunctions()
        paths = [f"{HERE}.marked", "no_such_module.f", f"{HERE}.gone", "os.system"]
        for path in paths:
            pass_to_queue(path, path, passed)

        assert list(passed) == paths

    def test_listeners_are_called_for_each_new_function(self):
        passed = PassedFunctions()
        calls: list[int] = []
        unsubscribe = passed.subscribe(lambda: calls.append(len(passed)))
        for path in ("a.b", "a.b", "a.c"):
            passed.add(path)
        unsubscribe()
        passed.add("a.d")

        assert calls == [1, 2]
