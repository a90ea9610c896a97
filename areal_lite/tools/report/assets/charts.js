// Line charts and bars. A chart is a dict of areal_lite/tools/report/charts.py.
const HEIGHT = 230;
const MARGIN = { left: 64, right: 12, top: 10, bottom: 40 };

function drawChart(box, chart) {
  onWidth(box, (width) => {
    box.replaceChildren();
    if (chart.kind === "line") drawLines(box, chart, width);
    else drawBars(box, chart, width);
  });
}

function frame(chart, width, low, high, text = tickText(ticks(low, high, 4))) {
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const y = (value) => inner.bottom - ((value - low) / (high - low || 1)) * (inner.bottom - inner.top);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "" });
  for (const value of ticks(low, high, 4)) {
    picture.append(
      svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: y(value), y2: y(value) }),
      svg("text", { x: inner.left - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)),
    );
  }
  const middle = (inner.top + inner.bottom) / 2;
  picture.append(
    svg("text", { x: (inner.left + inner.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, chart.x),
    svg("text", { transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, chart.y),
  );
  return { picture, inner, y };
}

function legend(series, style) {
  const items = series.map((one, index) =>
    html("li", {}, svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, ...style(one, index)), one.name));
  return html("ul", { class: "legend" }, ...items);
}

const DASHES = ["", "6 3", "2 2", "9 3 2 3"];

// Faint lines have the color of the line that follows them.
function paint(series) {
  let next = -1;
  return series.map((one, index) => {
    if (one.style === "bound") return { stroke: "var(--ink)", dash: "7 4" };
    if (index === 0 || series[index - 1].style !== "faint") next += 1;
    const dash = one.style === "line" ? DASHES[next % 4] : "";
    return { stroke: color(one.color ?? next), dash };
  });
}

function drawLines(box, chart, width) {
  const series = chart.series.filter((one) => one.x.length);
  const paints = paint(series);
  const numbers = series.flatMap((one) => one.y);
  if (!numbers.length) return drawEmpty(box, chart, width);
  const [low, high] = range(numbers);
  const { picture, inner, y } = frame(chart, width, low, high);
  const all = series.flatMap((one) => one.x);
  const [first, last] = [Math.min(...all), Math.max(...all)];
  const x = (value) => inner.left + ((value - first) / (last - first || 1)) * (inner.right - inner.left);
  for (const value of ticks(first, last, Math.floor(width / 90)))
    picture.append(svg("text", { x: x(value), y: inner.bottom + 16, "text-anchor": "middle" }, short(value)));
  series.forEach((one, index) => picture.append(...mark(one, paints[index], x, y)));
  picture.setAttribute("aria-label", `${chart.title}. ${summary(series)} Arrow keys read the values.`);
  const cross = svg("line", { class: "cross", y1: inner.top, y2: inner.bottom, visibility: "hidden" });
  picture.append(cross);
  box.append(
    legend(series, (one, index) => [
      one.style === "points"
        ? svg("circle", { cx: 11, cy: 5, r: 4, fill: paints[index].stroke })
        : svg("line", { class: one.style, x1: 0, x2: 22, y1: 5, y2: 5, stroke: paints[index].stroke, "stroke-dasharray": paints[index].dash }),
    ]),
    picture,
  );
  const places = [...new Set(all)].sort((a, b) => a - b);
  readable(picture, {
    count: places.length,
    find: (event) => {
      const bounds = picture.getBoundingClientRect();
      const at = first + ((event.clientX - bounds.left - inner.left) / (inner.right - inner.left)) * (last - first);
      return nearest(places, at);
    },
    show: (index) => {
      const at = places[index];
      cross.setAttribute("x1", x(at));
      cross.setAttribute("x2", x(at));
      cross.setAttribute("visibility", "visible");
      const near = (places[places.length - 1] - places[0]) / 100;
      const values = series
        .map((one) => ({ one, k: nearest(one.x, at) }))
        .filter(({ one, k }) => one.style === "bound" || Math.abs(one.x[k] - at) <= near)
        .map(({ one, k }) => `${one.name}: ${short(one.y[k])}`);
      const bounds = picture.getBoundingClientRect();
      return { text: [`${chart.x} ${short(at)}`, ...values].join("\n"), x: bounds.left + x(at), y: bounds.top + 40 };
    },
    leave: () => cross.setAttribute("visibility", "hidden"),
  });
}

function mark(one, paint, x, y) {
  const known = one.x.map((v, i) => [v, one.y[i]]).filter(([, v]) => v !== null);
  const dots = (r) => known.map(([a, b]) => svg("circle", { cx: x(a), cy: y(b), r, fill: paint.stroke }));
  if (one.style === "points") return dots(4.5);
  const path = known.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const line = svg("path", { class: one.style, d: path, stroke: paint.stroke, "stroke-dasharray": paint.dash });
  return known.length < 4 && one.style === "line" ? [line, ...dots(3)] : [line];
}

// The values that an axis shows: zero is included when it is near.
function range(numbers) {
  let low = numbers[0];
  let high = numbers[0];
  for (const value of numbers) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low >= 0 && low < 0.6 * high) low = 0;
  if (low === high) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 1)];
  const room = (high - low) * 0.05;
  return [low === 0 ? 0 : low - room, high + room];
}

function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function summary(series) {
  return series.map((one) => `${one.name}: from ${short(one.y[0])} to ${short(one.y[one.y.length - 1])}.`).join(" ");
}

function drawBars(box, chart, width) {
  const high = Math.max(...chart.values, 0);
  if (!high) return drawEmpty(box, chart, width);
  const percent = (value) => `${+(value * 100).toPrecision(3)} %`;
  const { picture, inner, y } = frame(chart, width, 0, high * 1.08, percent);
  const step = (inner.right - inner.left) / chart.values.length;
  const every = Math.ceil((chart.labels[chart.labels.length - 1].length * 8 + 10) / step);
  const bars = chart.values.map((value, index) => {
    const left = inner.left + index * step;
    if (index % every === 0)
      picture.append(svg("text", { x: left + step / 2, y: inner.bottom + 16, "text-anchor": "middle" }, chart.labels[index]));
    return svg("rect", { x: left + step * 0.08, width: step * 0.84, y: y(value), height: Math.max(inner.bottom - y(value), value ? 1 : 0), fill: color(0) });
  });
  picture.append(...bars);
  picture.setAttribute("aria-label", `${chart.title}. ${chart.values.length} bars. Arrow keys read the values.`);
  box.append(picture);
  const unmark = () => bars.forEach((bar) => bar.classList.remove("chosen"));
  readable(picture, {
    count: bars.length,
    find: (event) => {
      const at = (event.clientX - picture.getBoundingClientRect().left - inner.left) / step;
      return at >= 0 && at < bars.length ? Math.floor(at) : -1;
    },
    show: (index) => {
      unmark();
      bars[index].classList.add("chosen");
      const bounds = picture.getBoundingClientRect();
      const text = `${chart.labels[index]}: ${percent(chart.values[index])}\n${chart.counts[index].toLocaleString("en")} ${chart.unit}`;
      return { text, x: bounds.left + inner.left + index * step, y: bounds.top + 40 };
    },
    leave: unmark,
  });
}

function drawEmpty(box, chart, width) {
  const { picture } = frame(chart, width, 0, 1, () => "");
  picture.append(svg("text", { class: "empty", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no data in this run"));
  picture.setAttribute("aria-label", `${chart.title}: no data in this run`);
  box.append(picture);
}
