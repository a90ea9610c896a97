// The rollout browser: groups by step and reward, and the conversation with its tokens.
async function readHeavy(element) {
  const packed = element.textContent.trim();
  if (!packed) return [];
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const COLORINGS = {
  version: "weight version",
  logprob: "log-prob",
  weight: "importance weight",
};

function makeBrowser(box) {
  const state = { groups: [], group: null, sample: null, order: "step", coloring: "version" };
  const list = html("div", { class: "groups", role: "group", "aria-label": "Groups" });
  const view = html("div");
  const order = choice("Order", { step: "training step", low: "lowest reward first", high: "highest reward first" }, (value) => {
    state.order = value;
    drawList();
  });
  const coloring = choice("Color of a token", COLORINGS, (value) => {
    state.coloring = value;
    drawView();
  });
  box.replaceChildren(html("div", { class: "bar" }, order, coloring), html("div", { class: "browser" }, list, view));

  function drawList() {
    const sign = { step: 0, low: 1, high: -1 }[state.order];
    const groups = [...state.groups].sort((a, b) => sign * (a.reward - b.reward) || a.step - b.step || a.group - b.group);
    list.replaceChildren(...groups.map((group) => {
      const known = group.samples.some((one) => one.weights) ? ", weights known" : "";
      return html("button", { type: "button", "aria-current": group === state.group, on: { click: () => choose(group) } },
        `step ${group.step ?? "–"}, reward ${short(group.reward)}`,
        html("small", {}, `group ${group.group}, ${group.samples.length} samples${known}`));
    }));
    const current = list.querySelector("[aria-current=true]");
    if (current) list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
  }

  function choose(group, sample) {
    state.group = group;
    state.sample = sample || group.samples[0];
    drawList();
    drawView();
  }

  function drawView() {
    const { group, sample } = state;
    if (!group) return view.replaceChildren(html("p", {}, "This run has no group that was trained on yet."));
    const buttons = group.samples.map((one) =>
      html("button", { type: "button", "aria-current": one === sample, on: { click: () => choose(group, one) } },
        `sample ${one.sample}: ${short(one.reward)}`));
    view.replaceChildren(html("div", { class: "samples", role: "group", "aria-label": "Samples of the group" }, ...buttons),
      ...conversation(group, sample, state.coloring));
  }

  return {
    set(groups) {
      const before = [state.group?.group, state.sample?.sample];
      state.groups = groups;
      const group = groups.find((one) => one.group === before[0]) || most(groups, telling) || null;
      if (group) choose(group, group.samples.find((one) => one.sample === before[1]) || most(group.samples, versions));
      else drawView();
    },
    open(id, index) {
      const group = state.groups.find((one) => one.group === id);
      const sample = group?.samples.find((one) => one.sample === index);
      if (!sample) return;
      choose(group, sample);
      box.scrollIntoView({ block: "start" });
    },
  };
}

// The browser opens with a sample of many versions whose importance weights are known.
const versions = (sample) => new Set(sample.segments.map(([version]) => version)).size + (sample.weights ? 0.5 : 0);
const telling = (group) => Math.max(...group.samples.map(versions));

function most(items, value) {
  return items.reduce((best, one) => (best && value(best) >= value(one) ? best : one), null);
}

function choice(label, options, on) {
  const select = html("select", { on: { change: (event) => on(event.target.value) } },
    ...Object.entries(options).map(([value, text]) => html("option", { value }, text)));
  return html("label", {}, `${label} `, select);
}

// Runs of tokens that the policy sampled, or that others wrote.
function turns(sample) {
  const kind = new Array(sample.texts.length).fill(-1);
  for (const [version, start, end] of sample.segments) kind.fill(version, start, Math.min(end, kind.length));
  const found = [];
  kind.forEach((version, index) => {
    const sampled = version >= 0;
    const last = found[found.length - 1];
    if (last && last.sampled === sampled) last.tokens.push(index);
    else found.push({ sampled, tokens: [index] });
  });
  return { found, kind };
}

function conversation(group, sample, coloring) {
  const { found, kind } = turns(sample);
  const overdue = new Set(sample.overdue);
  const seen = [...new Set(kind.filter((version) => version >= 0))];
  const facts = html("p", { class: "facts" },
    `Prompt ${group.prompt}. ${seen.length === 1 ? "Weight version" : "Weight versions"} ${seen.join(", ")}`
    + `${group.step ? `, trained on in step ${group.step}` : `, ${group.state}`}; ended by ${sample.finish} after `
    + `${short(sample.seconds)} s${sample.server ? ` on ${sample.server}` : ""}.`
    + `${sample.weights ? "" : " Importance weights were not recorded for this sample."}`
    + `${sample.cut ? ` Only its first ${sample.texts.length} tokens are shown.` : ""}`);
  const spans = [];
  const blocks = found.map((turn, index) => {
    const text = html("p", { class: "text" });
    for (const token of turn.tokens) {
      const span = html("span", { class: `t${overdue.has(token) ? " masked" : ""}`, "data-token": token }, sample.texts[token]);
      if (turn.sampled) paintToken(span, sample, kind, token, coloring);
      spans.push(span);
      text.append(span);
    }
    const who = turn.sampled ? "sampled by the policy" : index ? "environment" : "prompt";
    return html("div", { class: `turn${turn.sampled ? " policy" : ""}` }, html("h4", {}, who), text);
  });
  const body = html("div", { role: "group", "aria-label": "Tokens. Arrow keys read them." }, ...blocks);
  const unmark = () => spans.forEach((span) => span.classList.remove("now"));
  readable(body, {
    count: spans.length,
    find: (event) => (event.target.dataset.token === undefined ? -1 : +event.target.dataset.token),
    show: (index, byKey) => {
      unmark();
      spans[index].classList.add("now");
      if (byKey) spans[index].scrollIntoView({ block: "nearest" });
      const bounds = spans[index].getBoundingClientRect();
      return { text: tokenText(sample, kind, index, overdue, group), x: bounds.left, y: bounds.bottom };
    },
    leave: unmark,
  });
  return [facts, tokenKey(seen, coloring), body];
}

function paintToken(span, sample, kind, token, coloring) {
  if (coloring === "version") return span.classList.add(`c${kind[token] % 8}`);
  const value = coloring === "logprob" ? sample.logprobs[token] : sample.weights?.[token];
  if (value === null || value === undefined) return;
  const strength = coloring === "logprob" ? clamp(-value / 4, 0, 1) : clamp(Math.abs(Math.log(value)) / 0.3, 0, 1);
  const hue = coloring === "weight" && value < 1 ? 0 : 1;
  span.style.backgroundColor = `color-mix(in srgb, ${color(hue)} ${Math.round(strength * 60)}%, transparent)`;
}

function tokenKey(seen, coloring) {
  if (coloring === "version")
    return legend(seen.map((version) => ({ name: `version ${version}`, version })),
      (one) => [svg("rect", { width: 22, height: 10, fill: color(one.version) })]);
  const text = coloring === "logprob"
    ? "The darker, the less likely the token was: full strength at −4 nats."
    : "Orange: the proximal policy finds the token more likely than the policy that sampled it. Blue: less likely. Full strength at a factor of 1.35.";
  return html("p", { class: "facts" }, text);
}

function tokenText(sample, kind, token, overdue, group) {
  const text = JSON.stringify(sample.texts[token]);
  if (kind[token] < 0) return `token ${token}: ${text}\nnot sampled: not in the loss`;
  const weight = sample.weights?.[token];
  const stale = group.step ? group.step - 1 - kind[token] : null;
  return [
    `token ${token}: ${text}`,
    `weight version ${kind[token]}${stale === null ? "" : `, staleness ${stale}`}`,
    `log-prob ${short(sample.logprobs[token])} nats`,
    `importance weight ${weight === undefined || weight === null ? "not recorded" : short(weight)}`,
    overdue.has(token) ? "masked: staler than the bound" : group.step ? "in the loss" : "not trained on",
  ].join("\n");
}
