// Checks the important rules of WCAG AA that a program can check; returns one line per fault.
(() => {
  const faults = [];
  const visible = (element) => {
    const style = getComputedStyle(element);
    return style.visibility !== "hidden" && style.display !== "none" &&
      element.getClientRects().length > 0;
  };
  const describe = (element) => element.outerHTML.slice(0, 90);
  const name = (element) => {
    const label = element.labels && element.labels.length ? element.labels[0].textContent : "";
    const described = element.getAttribute("aria-label") || element.getAttribute("title") || "";
    return (described || label || element.textContent || "").trim();
  };
  if (!document.documentElement.lang) faults.push("no language");
  if (!document.title.trim()) faults.push("no title");
  if (document.querySelectorAll("main").length !== 1) faults.push("not one main");
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push(`id twice: ${id}`);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!visible(heading)) continue;
    const own = Number(heading.tagName[1]);
    if (own > level + 1) faults.push(`heading skips a level: ${describe(heading)}`);
    level = own;
  }
  const controls = "a[href], button, input:not([type=hidden]), select, textarea, summary, progress";
  for (const element of document.querySelectorAll(controls)) {
    if (visible(element) && !name(element)) faults.push(`no name: ${describe(element)}`);
  }
  for (const image of document.querySelectorAll("svg, img")) {
    const hidden = image.closest("[aria-hidden=true]");
    if (!hidden && !image.getAttribute("aria-label")) faults.push(`no name: ${describe(image)}`);
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.querySelector("th")) faults.push(`table without headers: ${describe(table)}`);
  }

  const parse = (colour) => {
    const numbers = colour.match(/[\d.]+/g).map(Number);
    if (colour.startsWith("color(srgb")) for (let i = 0; i < 3; i++) numbers[i] *= 255;
    return numbers.length < 4 ? [...numbers, 1] : numbers;
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  // The body has a gradient of two plain colours; outside of cards the colour is --ground.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--ground)";
  const bottom = parse(getComputedStyle(probe).color);
  probe.remove();
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, layer) => over(layer, under), bottom);
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || seen.has(element) || !visible(element)) continue;
    seen.add(element);
    const style = getComputedStyle(element);
    const under = ground(element);
    const text = over(parse(style.color), under);
    const [high, low] = [light(text), light(under)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${describe(element)}`);
  }
  return faults;
})()
