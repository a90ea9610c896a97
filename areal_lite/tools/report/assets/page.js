// Draws the page from its data, and again when a followed run has more.
const POLL_MS = 3000;
const timelineBox = document.querySelector("[data-timeline]");
const rolloutBox = document.querySelector("[data-rollouts]");
const browser = rolloutBox && makeBrowser(rolloutBox);

async function draw(page) {
  const data = JSON.parse(page.getElementById("data").textContent);
  for (const figure of document.querySelectorAll("[data-chart]"))
    drawChart(figure.querySelector(".plot"), data.charts[figure.dataset.chart]);
  if (timelineBox && data.windows.length) drawTimeline(timelineBox, data.windows, (group, sample) => browser.open(group, sample));
  if (browser) browser.set(await readHeavy(page.getElementById("heavy")));
}

// The server of a followed run sends the whole page anew; what has an id and `data-live` is replaced.
async function follow() {
  let tag = null;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    try {
      const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status !== 200) continue;
      tag = answer.headers.get("ETag");
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const structure = (root) => [...root.querySelectorAll("main > section, [data-chart]")].map((node) => node.id || node.dataset.chart).join();
      if (structure(page) !== structure(document)) return location.reload();
      for (const old of document.querySelectorAll("[data-live]")) {
        const now = page.getElementById(old.id);
        if (now) old.replaceChildren(...document.importNode(now, true).childNodes);
      }
      await draw(page);
    } catch (error) {
      document.getElementById("foot").textContent = "The server of this page has ended; this is the last state that it sent.";
    }
  }
}

document.documentElement.classList.add("js");
draw(document).then(() => {
  document.documentElement.dataset.ready = "";
  if (document.documentElement.dataset.follow) follow();
});
