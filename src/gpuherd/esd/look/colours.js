// The colours of alpha and of its changes, in both schemes.

// Alpha: neutral at 4, the middle of 2 to 6 where the literature puts well-trained layers; full colour beyond.
const ALPHA_STOPS = [1, 2, 4, 6, 12];
const RAMPS = {
  light: [[8, 48, 107], [94, 158, 207], [245, 245, 242], [232, 146, 58], [110, 44, 4]],
  dark: [[158, 208, 250], [58, 120, 178], [48, 50, 56], [190, 104, 30], [255, 196, 128]],
};
const rgb = (parts) => `rgb(${parts.map(Math.round).join(",")})`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function ramp(value, stops) {
  const colours = RAMPS[isDark() ? "dark" : "light"];
  if (value <= stops[0]) return rgb(colours[0]);
  for (let at = 1; at < stops.length; at++) {
    if (value <= stops[at]) {
      const share = (value - stops[at - 1]) / (stops[at] - stops[at - 1]);
      return rgb(colours[at].map((part, i) => colours[at - 1][i] + share * (part - colours[at - 1][i])));
    }
  }
  return rgb(colours[colours.length - 1]);
}

function inkOn(background) {
  const [r, g, b] = background.match(/\d+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111111" : "#ffffff";
}
