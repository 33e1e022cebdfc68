"use strict";
// Draws the figures whose descriptions stand in the page as JSON, in the colours of the page.
(() => {
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const paper = style.getPropertyValue("--card").trim();
    return {
      "font.color": ink, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": line, "modebar.activecolor": ink,
      "hoverlabel.bgcolor": paper, "hoverlabel.font.color": ink, "hoverlabel.bordercolor": line,
    };
  };
  const set = (layout, key, value) => {
    const parts = key.split(".");
    const last = parts.pop();
    let at = layout;
    for (const part of parts) at = at[part] = at[part] || {};
    at[last] = value;
  };
  const drawn = [];
  for (const source of document.querySelectorAll("script[data-chart]")) {
    const figure = JSON.parse(source.textContent);
    for (const [key, value] of Object.entries(colours())) set(figure.layout, key, value);
    figure.layout.font = Object.assign({ family: "system-ui, sans-serif", size: 13 }, figure.layout.font);
    if (innerWidth < 600) figure.layout.dragmode = false; // a finger scrolls the page
    const place = document.getElementById(source.dataset.chart);
    const config = {
      responsive: true, displaylogo: false, displayModeBar: innerWidth < 600 ? false : "hover",
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    };
    Plotly.newPlot(place, figure.data, figure.layout, config);
    drawn.push(place);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const place of drawn) Plotly.relayout(place, colours());
  });
  document.documentElement.dataset.drawn = String(drawn.length);
})();
