// Keeps a page up to date: when the server reports a change, the parts marked data-live that have
// changed are fetched and replaced. Without this script every page is complete, and shows the state at
// the time it was loaded.
"use strict";
(() => {
  const POLL_INTERVAL = 5000;
  const body = document.body;
  const mark = document.getElementById("live-mark");
  const refreshAlways = body.dataset.refresh === "always";
  const refreshNever = body.dataset.refresh === "never";
  const tokenField = document.querySelector(".foot input[name=token]");
  let source = null;
  let poll = 0;
  let version = null;
  let busy = false;
  let takenAt = 0;
  let staleAfter = 6;
  let isHeld = false;
  let isPaused = false;

  const exact = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "short", day: "numeric",
    hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
  });

  const zone = new Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
  const hour = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
  const dayAndHour = new Intl.DateTimeFormat(undefined, {
    month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
  });
  const formats = { at: exact, clock: hour, day };

  function localise(root) {
    for (const time of root.querySelectorAll("time[data-time]")) {
      const instant = new Date(time.dateTime);
      const format = formats[time.dataset.time];
      if (format) time.textContent = format.format(instant);
      time.title = `${exact.format(instant)} ${zone} (${time.dateTime})`;
    }
    for (const place of root.querySelectorAll("[data-zone]")) place.textContent = zone;
  }

  function showState(text, state) {
    if (!mark || (isPaused && state === "on")) return;
    if (mark.textContent !== text) mark.textContent = text;
    mark.dataset.state = state;
  }

  // A part in use is not replaced: it has the focus, selected text, a selected checkbox, something open or something typed.
  function inUse(part) {
    const selection = getSelection();
    return part.contains(document.activeElement) ||
      (selection && !selection.isCollapsed && part.contains(selection.anchorNode)) ||
      part.querySelector("input:checked, details.confirm[open], details.more[open]") !== null ||
      [...part.querySelectorAll("input:not([type=hidden], [type=checkbox]), textarea")].some((field) => field.value !== field.defaultValue);
  }

  // What was opened stays open.
  function keepOpen(part, next) {
    const before = [...part.querySelectorAll("details")];
    const after = [...next.querySelectorAll("details")];
    if (before.length === after.length) before.forEach((each, number) => { after[number].open = each.open; });
  }

  function showAge() {
    if (!mark || !takenAt || isPaused || mark.dataset.state === "off") return;
    const age = (performance.now() - takenAt) / 1000;
    if (age > staleAfter) showState(`data is ${Math.round(age)} s old`, "stale");
    else if (mark.dataset.state === "stale") showState("live", "on");
  }

  async function refresh() {
    if (busy || isPaused) return;
    busy = true;
    try {
      const live = [...document.querySelectorAll("[data-live]")];
      const known = live.map((part) => part.dataset.hash).join(" ");
      const response = await fetch(location.href, {
        credentials: "same-origin", cache: "no-store", headers: { "omniq-parts": known },
      });
      if (response.status === 401) { showState("signed out", "off"); stop(); return; }
      if (!response.ok) throw new Error(String(response.status));
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      localise(fresh);
      isHeld = false;
      for (const part of live) {
        const next = fresh.getElementById(part.id);
        if (!next || part.dataset.hash === next.dataset.hash) continue;
        if (inUse(part)) { isHeld = true; continue; }
        // Parts are sent without the token of the session.
        for (const field of next.querySelectorAll("input[name=token]")) field.value = tokenField ? tokenField.value : "";
        keepOpen(part, next);
        part.replaceWith(document.adoptNode(next));
      }
      if (mark) mark.title = isHeld ? "A part that you use is not updated" : "";
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
      takenAt = performance.now() - snapshot.age * 1000;
      staleAfter = snapshot.stale_after;
      showState("live", "on");
      showAge();
      if (refreshNever) return;
      if (refreshAlways || version !== snapshot.version) {
        if (version !== null) refresh();
        version = snapshot.version;
      }
    });
    source.addEventListener("storage_error", () => {
      showState("storage does not respond", "off");
      if (!refreshNever) refresh();
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

  // A search that still runs: a refresh waits until it is done.
  function followSearch() {
    if (document.querySelector("[data-searching]")) setTimeout(() => refresh().then(followSearch), 200);
  }

  // Checkboxes: one that selects all, and the number of selected ones.
  function prepare() {
    for (const form of document.querySelectorAll("form[data-bulk]")) {
      const all = form.querySelector("[data-all]");
      if (all) all.hidden = false;
      count(form);
    }
    for (const button of document.querySelectorAll("[data-copy], [data-copy-previous], [data-cancel]")) button.hidden = false;
  }

  function count(form) {
    const boxes = [...form.querySelectorAll("input[name=ids]")];
    const selected = boxes.filter((box) => box.checked).length;
    const label = form.querySelector("[data-selected]");
    if (label) label.textContent = `${selected} selected`;
    for (const button of form.querySelectorAll("[data-needs-selection]")) button.disabled = selected === 0;
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

  document.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-copy], [data-copy-previous]");
    if (copy) {
      const text = copy.dataset.copy || copy.parentElement.previousElementSibling.textContent;
      navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Not copied"; });
    }
    if (event.target.closest("[data-cancel]")) event.target.closest("details").open = false;
    if (event.target.closest("[data-shortcuts]")) shortcuts.showModal();
    if (event.target.closest("[data-theme-toggle]")) nextTheme();
    if (event.target.closest("[data-pause-updates]")) pauseUpdates();
  });

  // Updates can be paused, so that what is read stays where it is.
  const pauseButton = document.querySelector("[data-pause-updates]");
  if (pauseButton && !refreshNever) pauseButton.hidden = false;

  function pauseUpdates() {
    isPaused = !isPaused;
    pauseButton.textContent = isPaused ? "Resume updates" : "Pause updates";
    pauseButton.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) { stop(); showState("updates paused", "stale"); } else { showState("live", "on"); version = null; refresh(); listen(); }
  }

  // Theme: that of the system, light or dark.
  const toggle = document.querySelector("[data-theme-toggle]");
  const themes = ["system", "light", "dark"];
  const theme = () => document.documentElement.dataset.theme || "system";

  function nextTheme() {
    const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try { localStorage.setItem("omniq-theme", next); } catch (error) { /* for this page only */ }
    showTheme();
  }

  function showTheme() {
    if (toggle) { toggle.hidden = false; toggle.textContent = `Theme: ${theme()}`; }
  }

  // The figures of a chart where the pointer is.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const slot = event.target.closest && event.target.closest("rect[data-tip]");
    tip.hidden = !slot;
    if (!slot) return;
    tip.textContent = `${dayAndHour.format(new Date(slot.dataset.at))}: ${slot.dataset.tip}`;
    const box = slot.getBoundingClientRect();
    tip.style.left = `${Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.max(8, box.top - tip.offsetHeight - 6)}px`;
  });

  const shortcuts = document.getElementById("shortcuts");
  const shortcutsButton = document.querySelector("[data-shortcuts]");
  if (shortcutsButton) shortcutsButton.hidden = false;
  const places = [...document.querySelectorAll(".side nav a")].map((link) => link.getAttribute("href"));
  const keys = body.dataset.keys || "";
  let wasG = false;

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const search = document.querySelector("[data-search]");
      if (search) { event.preventDefault(); search.focus(); }
    }
    if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      if (event.key === "?" && shortcuts) shortcuts.showModal();
      if (wasG && keys.includes(event.key) && places[keys.indexOf(event.key)]) location.href = places[keys.indexOf(event.key)];
      wasG = event.key === "g";
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
    if (document.hidden) { stop(); } else if (mark && !isPaused) { version = null; refresh(); listen(); }
  });

  localise(document);
  prepare();
  showTheme();
  followSearch();
  setInterval(showAge, 1000);
  const current = document.querySelector(".side nav a[aria-current]");
  if (current && matchMedia("(max-width: 52rem)").matches) current.scrollIntoView({ block: "nearest", inline: "center" });
  if (mark) listen();
})();
