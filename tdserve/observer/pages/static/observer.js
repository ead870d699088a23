// Live charts: counts are asked for every two seconds, and drawn as lines of what they change by in a second.
"use strict";
(() => {
  const place = document.getElementById("charts");
  if (!place) return;
  const PERIOD_MS = 2000, MIN_POINTS = 30, MAX_POINTS = 150, WIDTH = 300, HEIGHT = 56;
  const SVG = "http://www.w3.org/2000/svg";
  const shorten = (value) => {
    const units = ["", "k", "M", "G", "T"];
    let unit = 0;
    while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return (value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(2)) + (unit ? " " + units[unit] : "");
  };
  const joinUnit = (text, unit) => text.includes(" ") ? text + unit : `${text} ${unit}`;
  const charts = [
    ["requests", "Requests/s", true, shorten],
    ["rows_in", "Rows in/s", true, shorten],
    ["rows_out", "Rows out/s", true, shorten],
    ["bytes_in", "Content in", true, (value) => joinUnit(shorten(value), "B/s")],
    ["bytes_out", "Content out", true, (value) => joinUnit(shorten(value), "B/s")],
    ["cpu_s", "Cores busy", true, (value) => value.toFixed(2)],
    ["memory", "Memory", false, (value) => joinUnit(shorten(value), "B")],
    ["sessions", "Sessions", false, shorten],
  ].map(([name, title, isRate, format]) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const label = document.createElement("span"), value = document.createElement("output");
    const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "path");
    figure.className = "chart";
    label.textContent = title;
    value.textContent = "…";
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    caption.append(label, value);
    figure.append(caption, svg);
    place.append(figure);
    return { name, isRate, format, value, line, points: [] };
  });
  let before = null;
  const draw = (chart, point) => {
    chart.points.push(point);
    if (chart.points.length > MAX_POINTS) chart.points.shift();
    // The last minute at first, and up to five as they pass.
    const num = Math.max(chart.points.length, MIN_POINTS), first = num - chart.points.length;
    const most = Math.max(...chart.points), step = WIDTH / (num - 1);
    const path = chart.points.map((each, number) =>
      `${number ? "L" : "M"}${((first + number) * step).toFixed(1)} ${(HEIGHT - 2 - each / (most || 1) * (HEIGHT - 6)).toFixed(1)}`);
    chart.line.setAttribute("d", path.join(""));
    chart.value.textContent = `${chart.format(point)} (most ${chart.format(most)})`;
  };
  const look = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(place.dataset.source, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(String(answer.status));
      const counts = await answer.json();
      if (before && counts.time_s > before.time_s) {
        const elapsed = counts.time_s - before.time_s;
        for (const chart of charts) {
          const change = Math.max(counts[chart.name] - before[chart.name], 0);
          draw(chart, chart.isRate ? change / elapsed : counts[chart.name]);
        }
      }
      if (!before || counts.time_s !== before.time_s) before = counts;
    } catch (error) {
      for (const chart of charts) chart.value.textContent = "no answer";
      before = null;
    }
  };
  look();
  setInterval(look, PERIOD_MS);
})();
