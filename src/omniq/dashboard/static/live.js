// Keeps a page up to date: when the server reports a change, the page is fetched again and its
// parts marked data-live are replaced. Without this script every page is complete, and shows the
// state at the time it was loaded.
"use strict";
(() => {
  const POLL_INTERVAL = 5000;
  const body = document.body;
  const mark = document.getElementById("live-mark");
  const refreshAlways = body.dataset.refresh === "always";
  let source = null;
  let poll = 0;
  let version = null;
  let busy = false;

  const exact = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "short", day: "numeric",
    hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
  });

  function localise(root) {
    for (const time of root.querySelectorAll("time[data-time]")) {
      const instant = new Date(time.dateTime);
      if (time.dataset.time === "at") time.textContent = exact.format(instant);
      time.title = `${exact.format(instant)} (${time.dateTime})`;
    }
  }

  function showState(text, state) {
    if (!mark) return;
    if (mark.textContent !== text) mark.textContent = text;
    mark.dataset.state = state;
  }

  // A part in use is not replaced: it has the focus, a selected checkbox or an open confirmation.
  function inUse(part) {
    return part.contains(document.activeElement) ||
      part.querySelector("input:checked, details.confirm[open]") !== null;
  }

  async function refresh() {
    if (busy) return;
    busy = true;
    try {
      const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
      if (response.status === 401) { showState("signed out", "off"); stop(); return; }
      if (!response.ok) throw new Error(String(response.status));
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      localise(fresh);
      for (const part of document.querySelectorAll("[data-live]")) {
        const next = fresh.getElementById(part.id);
        if (!next || inUse(part) || part.isEqualNode(next)) continue;
        part.replaceWith(document.adoptNode(next));
      }
      prepare();
    } catch (error) {
      showState("no response", "off");
    } finally {
      busy = false;
    }
  }

  function listen() {
    stop();
    source = new EventSource(`${body.dataset.base}/api/stream`);
    source.addEventListener("snapshot", (event) => {
      const snapshot = JSON.parse(event.data);
      showState("live", "on");
      if (refreshAlways || version !== snapshot.version) {
        if (version !== null) refresh();
        version = snapshot.version;
      }
    });
    source.addEventListener("storage_error", () => {
      showState("storage does not respond", "off");
    });
    source.onerror = () => {
      // The stream was closed or refused: poll instead, until the page is shown again.
      if (source && source.readyState === EventSource.CLOSED) {
        stop();
        showState("polling", "poll");
        poll = setInterval(refresh, POLL_INTERVAL);
      }
    };
  }

  function stop() {
    if (source) source.close();
    source = null;
    clearInterval(poll);
  }

  // Checkboxes: one that selects all, and the number of selected ones.
  function prepare() {
    for (const form of document.querySelectorAll("form[data-bulk]")) {
      const all = form.querySelector("[data-all]");
      if (all) all.hidden = false;
    }
  }

  function count(form) {
    const boxes = [...form.querySelectorAll("input[name=ids]")];
    const selected = boxes.filter((box) => box.checked).length;
    const label = form.querySelector("[data-selected]");
    if (label) label.textContent = `${selected} selected`;
    const all = form.querySelector("[data-all]");
    if (all) {
      all.checked = selected > 0 && selected === boxes.length;
      all.indeterminate = selected > 0 && selected < boxes.length;
    }
  }

  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-bulk]");
    if (!form) return;
    if (event.target.matches("[data-all]")) {
      for (const box of form.querySelectorAll("input[name=ids]")) box.checked = event.target.checked;
    }
    count(form);
  });

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const search = document.querySelector("[data-search]");
      if (search) { event.preventDefault(); search.focus(); }
    }
    if (event.key === "Escape") {
      for (const open of document.querySelectorAll("details.confirm[open]")) open.open = false;
    }
  });

  document.addEventListener("toggle", (event) => {
    if (!event.target.matches("details.confirm[open]")) return;
    for (const other of document.querySelectorAll("details.confirm[open]")) {
      if (other !== event.target) other.open = false;
    }
  }, true);

  document.addEventListener("visibilitychange", () => {
    // A browser has few connections per site: a hidden page closes its stream.
    if (document.hidden) { stop(); } else if (mark) { version = null; refresh(); listen(); }
  });

  localise(document);
  prepare();
  if (mark) listen();
})();
