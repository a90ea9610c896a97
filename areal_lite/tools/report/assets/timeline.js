// The timeline: trajectories as bars on the lanes of their servers, pushes and steps above.
const ROW = 7;

function drawTimeline(box, windows, openRollout) {
  const before = windows.findIndex((view) => view.name === box.dataset.window);
  const first = before >= 0 ? before : windows.length > 1 ? 1 : 0;
  const picker = html("div", { class: "bar", role: "group", "aria-label": "Part of the run" });
  const note = html("p", { class: "facts" });
  const picture = html("div", { class: "plot" });
  const show = (index) => {
    [...picker.children].forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    const view = windows[index];
    box.dataset.window = view.name;
    const thinned = view.bars.length < view.total ? ", spaced evenly" : "";
    note.textContent = `Shown: ${view.bars.length} of the ${view.total.toLocaleString("en")} trajectories in these ${short(view.end - view.start)} seconds${thinned}. Enter or a click opens a trajectory that this page has.`;
    onWidth(picture, (width) => picture.replaceChildren(timelinePicture(view, width, openRollout)));
  };
  if (windows.length > 1)
    picker.append(...windows.map((view, i) => html("button", { type: "button", on: { click: () => show(i) } }, view.name)));
  box.replaceChildren(picker, note, picture);
  show(first);
}

function timelinePicture(view, width, openRollout) {
  const servers = [...new Set(view.bars.map((bar) => bar.server))].sort();
  const x = (seconds) => ((clamp(seconds, view.start, view.end) - view.start) / (view.end - view.start)) * width;
  const picture = svg("svg", { role: "img", "aria-label": `${view.bars.length} trajectories on ${servers.length} servers. Arrow keys read them in order of their start.` });
  picture.append(svg("text", { class: "name", x: 0, y: 11 }, "trainer: steps"));
  for (const [step, start, end] of view.steps) {
    const [left, right] = [x(start), x(end)];
    picture.append(svg("rect", { x: left, y: 17, width: Math.max(1, right - left), height: 15, fill: color(7) }));
    if (right - left > 22) picture.append(svg("text", { class: "onbar", x: (left + right) / 2, y: 28.5, "text-anchor": "middle" }, step));
  }
  let top = 70;
  const places = [];
  for (const server of servers) {
    const own = view.bars.filter((bar) => bar.server === server);
    picture.append(svg("text", { class: "name", x: 0, y: top - 5 }, server));
    for (const bar of own) {
      const y = top + bar.row * ROW;
      const group = svg("g");
      for (const [version, start, end] of bar.spans)
        if (end > view.start && start < view.end)
          group.append(svg("rect", { x: x(start), y, width: Math.max(0.8, x(end) - x(start)), height: ROW - 1.5, fill: color(version) }));
      picture.append(group);
      places.push({ bar, group, left: x(bar.spans[0][1]), right: x(bar.spans[bar.spans.length - 1][2]), y });
    }
    top += (Math.max(...own.map((bar) => bar.row)) + 1) * ROW + 24;
  }
  const bottom = top - 18;
  let free = -Infinity;
  for (const [version, start, end] of view.pushes) {
    picture.append(
      svg("rect", { x: x(start), y: 40, width: Math.max(0, x(end) - x(start)), height: bottom - 40, fill: "var(--paper)", opacity: 0.6 }),
      svg("line", { x1: x(start), x2: x(start), y1: 36, y2: bottom, stroke: "var(--ink)" }),
    );
    if (x(start) - free > 6 && x(start) < width - 24) {
      picture.append(svg("text", { class: "name", x: x(start) + 3, y: 45 }, `v${version}`));
      free = x(start) + 26;
    }
  }
  for (const value of ticks(view.start, view.end, Math.floor(width / 100)))
    picture.append(svg("text", { x: clamp(x(value), 8, width - 14), y: bottom + 15, "text-anchor": "middle" }, short(value)));
  picture.append(svg("text", { x: width / 2, y: bottom + 31, "text-anchor": "middle" }, "seconds since the first trajectory"));
  picture.setAttribute("viewBox", `0 0 ${width} ${bottom + 36}`);
  places.sort((a, b) => a.left - b.left || a.y - b.y);
  const unmark = () => places.forEach((place) => place.group.classList.remove("chosen"));
  readable(picture, {
    count: places.length,
    find: (event) => {
      const bounds = picture.getBoundingClientRect();
      const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
      return places.findIndex((place) => py >= place.y && py < place.y + ROW && px >= place.left - 2 && px <= place.right + 2);
    },
    show: (index) => {
      unmark();
      places[index].group.classList.add("chosen");
      const bounds = picture.getBoundingClientRect();
      const place = places[index];
      return { text: barText(place.bar), x: bounds.left + place.left, y: bounds.top + place.y };
    },
    leave: unmark,
    open: (index) => openRollout(places[index].bar.group, places[index].bar.sample),
  });
  return picture;
}

function barText(bar) {
  const [start, end] = [bar.spans[0][1], bar.spans[bar.spans.length - 1][2]];
  return [
    `group ${bar.group}, sample ${bar.sample} on ${bar.server}`,
    `reward ${short(bar.reward)}, ${bar.tokens} sampled tokens`,
    `${short(start)} to ${short(end)} s (${short(end - start)} s)`,
    `weight versions ${bar.spans.map(([version]) => version).join(" → ")}`,
    bar.step ? `trained on in step ${bar.step}` : "not trained on",
  ].join("\n");
}
