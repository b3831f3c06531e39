"use strict";
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";

function duration(seconds) {
  if (seconds >= 1) return seconds.toFixed(2) + " s";
  if (seconds >= 1e-3) return (1e3 * seconds).toFixed(seconds >= 1e-2 ? 0 : 1) + " ms";
  return (1e6 * seconds).toFixed(0) + " µs";
}
