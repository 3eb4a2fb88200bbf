// Values under the pointer. Each chart carries its drawn points: [step, x, y, text].
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");
  const colour = (number) => getComputedStyle(document.documentElement).getPropertyValue(`--c${number}`);
  const nearest = (points, x) => points.reduce((best, point) => (Math.abs(point[1] - x) < Math.abs(best[1] - x) ? point : best));
  const add = (parent, name, attributes) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
  };
  for (const chart of document.querySelectorAll("svg.chart")) {
    const series = JSON.parse(chart.dataset.series);
    const pointer = chart.querySelector(".pointer");
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
      const all = series.map((one) => [one, nearest(one.p, x)]);
      const at = all.map(([, point]) => point).reduce((best, point) => (Math.abs(point[1] - x) < Math.abs(best[1] - x) ? point : best));
      const shown = all.filter(([, point]) => Math.abs(point[1] - at[1]) < 6);
      pointer.replaceChildren();
      add(pointer, "line", { x1: at[1], x2: at[1], y1: chart.dataset.top, y2: chart.dataset.bottom });
      tip.replaceChildren(`step ${at[0]}`);
      for (const [one, point] of shown) {
        add(pointer, "circle", { cx: point[1], cy: point[2], r: 3.5, fill: colour(one.c) });
        const row = document.createElement("div");
        const dot = document.createElement("i");
        dot.style.background = colour(one.c);
        const value = document.createElement("b");
        value.textContent = point[3];
        row.append(dot, one.n, value);
        tip.append(row);
      }
      tip.hidden = false;
      const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4))}px`;
    });
    chart.addEventListener("pointerleave", () => {
      pointer.replaceChildren();
      tip.hidden = true;
    });
  }
})();
