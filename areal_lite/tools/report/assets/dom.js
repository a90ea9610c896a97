// Small helpers. Text from a run enters the page through textContent only.
const SVG = "http://www.w3.org/2000/svg";

function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const color = (index) => `var(--c${((index % 8) + 8) % 8})`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${+(value / (unit === 1e4 ? 1e3 : unit)).toPrecision(3)}${suffix}`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return `${+value.toPrecision(size >= 100 ? 4 : 3)}`.replace("-", "−");
}

// Round numbers that cover [low, high]: about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// All labels of an axis in one notation: 0.0005 below 0.001, and 5.0e−4 where all are that small.
function tickText(values) {
  const large = values.some((value) => Math.abs(value) >= 1e-3);
  return (value) => (large && Math.abs(value) < 1e-3 ? `${+value.toPrecision(3)}`.replace("-", "−") : short(value));
}

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  tip.style.left = `${clamp(left, 4, Math.max(4, innerWidth - box.width - 4))}px`;
  tip.style.top = `${clamp(y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14, 4, innerHeight)}px`;
}

function hideTip() {
  tip.hidden = true;
}
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
// What the pointer is over changes when the page scrolls; what the keyboard chose does not.
addEventListener("scroll", () => tip.dataset.by === "pointer" && hideTip(), { passive: true });

// Draw into `box` now and whenever its width changes.
function onWidth(box, draw) {
  let width = 0;
  const redraw = () => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) draw((width = now));
  };
  if (box.watcher) box.watcher.disconnect();
  box.watcher = new ResizeObserver(redraw);
  box.watcher.observe(box);
  redraw();
}

// Let a drawing of `count` items be read by pointer and by arrow keys. `show(index, byKey)` marks
// an item and returns its text and place.
function readable(node, { count, find, show, leave, open }) {
  let at = -1;
  const point = (index, x, y) => {
    at = index;
    const byKey = x === undefined;
    const shown = show(index, byKey);
    tip.dataset.by = byKey ? "key" : "pointer";
    showTip(shown.text, x ?? shown.x, y ?? shown.y);
  };
  node.setAttribute("tabindex", "0");
  node.addEventListener("pointermove", (event) => {
    const index = find(event);
    if (index >= 0) point(index, event.clientX, event.clientY);
    else end();
  });
  const end = () => {
    hideTip();
    leave();
  };
  node.addEventListener("pointerleave", end);
  node.addEventListener("blur", end);
  node.addEventListener("click", (event) => open && find(event) >= 0 && open(find(event)));
  node.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Enter" && open && at >= 0) open(at);
    if (!by && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    if (event.key === "Home" || event.key === "End") point(event.key === "Home" ? 0 : count - 1);
    else point(clamp(at < 0 ? (by > 0 ? 0 : count - 1) : at + by, 0, count - 1));
  });
}
