// Utilization lanes: for each part of the run, the shares of its states over time.
const LANE_HEIGHT = 26;
const LANE_GAP = 20;

// Work is blue, a pause or a push orange, waiting grey.
const STATE_COLORS = {
  trains: color(0), generates: color(0), "a batch waits for the trainer": color(2),
  "pushes weights": color(1), "is paused for a push": color(1),
};
const stateColor = (state) => STATE_COLORS[state] || "var(--idle)";

function drawLanes(box, data) {
  onWidth(box, (width) => {
    const states = [...new Set(data.lanes.flatMap((lane) => Object.keys(lane.shares)))];
    const drawn = states.filter((state) => STATE_COLORS[state]);
    const key = drawn.map((state) => ({ name: state }));
    key.push({ name: "waits, or does something else" });
    box.replaceChildren(legend(key, (one) => [svg("rect", { width: 22, height: 10, fill: stateColor(one.name) })]));
    const height = data.lanes.length * (LANE_HEIGHT + LANE_GAP) + 46;
    const picture = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `What ${data.lanes.map((lane) => lane.name).join(", ")} did over time. Arrow keys read the values.`,
    });
    const step = width / data.bins;
    data.lanes.forEach((lane, row) => {
      const top = row * (LANE_HEIGHT + LANE_GAP) + LANE_GAP - 4;
      picture.append(svg("text", { class: "name", x: 0, y: top - 5 }, lane.name));
      picture.append(svg("rect", { class: "idle", x: 0, y: top, width, height: LANE_HEIGHT }));
      let below = new Array(data.bins).fill(0);
      for (const state of drawn.filter((name) => lane.shares[name])) {
        const above = below.map((share, bin) => share + lane.shares[state][bin]);
        picture.append(svg("path", { d: area(below, above, step, top), fill: stateColor(state) }));
        below = above;
      }
    });
    const bottom = height - 40;
    for (const value of ticks(0, data.seconds, Math.floor(width / 90)))
      picture.append(svg("text", { x: clamp((value / data.seconds) * width, 8, width - 14), y: bottom + 8, "text-anchor": "middle" }, short(value)));
    picture.append(svg("text", { x: width / 2, y: height - 6, "text-anchor": "middle" }, "seconds since the first trajectory"));
    const cross = svg("line", { class: "cross", y1: 0, y2: bottom - 6, visibility: "hidden" });
    picture.append(cross);
    box.append(picture);
    readable(picture, {
      count: data.bins,
      find: (event) => clamp(Math.floor((event.clientX - picture.getBoundingClientRect().left) / step), 0, data.bins - 1),
      show: (bin) => {
        const x = (bin + 0.5) * step;
        cross.setAttribute("x1", x);
        cross.setAttribute("x2", x);
        cross.setAttribute("visibility", "visible");
        const bounds = picture.getBoundingClientRect();
        return { text: laneText(data, bin), x: bounds.left + x, y: bounds.top + 30 };
      },
      leave: () => cross.setAttribute("visibility", "hidden"),
    });
  });
}

function area(below, above, step, top) {
  const y = (share) => (top + LANE_HEIGHT * (1 - clamp(share, 0, 1))).toFixed(1);
  const x = (bin) => (bin * step).toFixed(1);
  const up = above.map((share, bin) => `L${x(bin)} ${y(share)}L${x(bin + 1)} ${y(share)}`).join("");
  const down = below.map((share, bin) => `L${x(bin + 1)} ${y(share)}L${x(bin)} ${y(share)}`).reverse().join("");
  return `M0 ${y(below[0])}${up}${down}Z`;
}

function laneText(data, bin) {
  const at = (edge) => short((edge / data.bins) * data.seconds);
  const rows = data.lanes.map((lane) => {
    const parts = Object.entries(lane.shares)
      .filter(([, shares]) => shares[bin] >= 0.005)
      .map(([state, shares]) => `${state} ${Math.round(shares[bin] * 100)} %`);
    return `${lane.name}: ${parts.join(", ")}`;
  });
  return [`${at(bin)} to ${at(bin + 1)} s`, ...rows].join("\n");
}
