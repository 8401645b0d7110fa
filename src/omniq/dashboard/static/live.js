// Keeps a page up to date: the server says that something has changed, the page asks for itself
// again, and the parts marked data-live take the place of the old ones. Without this file every
// page is complete, as of the moment it was opened.
"use strict";
(() => {
  const POLL = 5000;
  const body = document.body;
  const mark = document.getElementById("live-mark");
  const always = body.dataset.pace === "always";
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

  function say(text, state) {
    if (!mark) return;
    if (mark.textContent !== text) mark.textContent = text;
    mark.dataset.state = state;
  }

  // A part that somebody is using stays as it is: a box they ticked, a question they opened.
  function inUse(part) {
    return part.contains(document.activeElement) ||
      part.querySelector("input:checked, details.confirm[open]") !== null;
  }

  async function refresh() {
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
      if (answer.status === 401) { say("signed out", "off"); stop(); return; }
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      localise(fresh);
      for (const part of document.querySelectorAll("[data-live]")) {
        const next = fresh.getElementById(part.id);
        if (!next || inUse(part) || part.isEqualNode(next)) continue;
        part.replaceWith(document.adoptNode(next));
      }
      prepare();
    } catch (error) {
      say("no answer", "off");
    } finally {
      busy = false;
    }
  }

  function listen() {
    stop();
    source = new EventSource(`${body.dataset.base}/api/stream`);
    source.addEventListener("look", (event) => {
      const told = JSON.parse(event.data);
      say("live", "on");
      if (always || version !== told.version) {
        if (version !== null) refresh();
        version = told.version;
      }
    });
    source.addEventListener("trouble", () => { say("storage does not answer", "off"); });
    source.onerror = () => {
      // The stream was cut or refused: ask now and then, and try to listen again.
      if (source && source.readyState === EventSource.CLOSED) {
        stop();
        say("polling", "poll");
        poll = setInterval(refresh, POLL);
      }
    };
  }

  function stop() {
    if (source) source.close();
    source = null;
    clearInterval(poll);
  }

  // Boxes: one that ticks all, and how many are ticked.
  function prepare() {
    for (const form of document.querySelectorAll("form[data-bulk]")) {
      const all = form.querySelector("[data-all]");
      if (all) all.hidden = false;
    }
  }

  function count(form) {
    const boxes = [...form.querySelectorAll("input[name=ids]")];
    const ticked = boxes.filter((box) => box.checked).length;
    const words = form.querySelector("[data-chosen]");
    if (words) words.textContent = ticked ? `${ticked} ticked` : "None is ticked";
    const all = form.querySelector("[data-all]");
    if (all) {
      all.checked = ticked > 0 && ticked === boxes.length;
      all.indeterminate = ticked > 0 && ticked < boxes.length;
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
    // A browser has few connections for one site: a page that nobody sees gives its own back.
    if (document.hidden) { stop(); } else if (mark) { version = null; refresh(); listen(); }
  });

  localise(document);
  prepare();
  if (mark) listen();
})();
