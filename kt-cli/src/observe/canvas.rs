//! A picture to fill with rectangles and text.

use super::font::{self, ADVANCE, HEIGHT};

/// Red, green and blue of sRGB.
pub type Colour = [u8; 3];

/// Pixels, row by row.
pub struct Canvas {
    pub width: usize,
    pub height: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    pub fn new(width: usize, height: usize, background: Colour) -> Self {
        Canvas { width, height, pixels: vec![background; width * height] }
    }

    /// Fills a rectangle; what lies outside of the picture is left out.
    pub fn fill(&mut self, (x, y): (usize, usize), (width, height): (usize, usize), colour: Colour) {
        let columns = x.min(self.width)..(x + width).min(self.width);
        for row in y.min(self.height)..(y + height).min(self.height) {
            self.pixels[row * self.width..][columns.clone()].fill(colour);
        }
    }

    /// Writes a line of text, its upper left corner at `(x, y)`, each dot `scale` pixels wide.
    pub fn text(&mut self, (x, y): (usize, usize), text: &str, scale: usize, colour: Colour) {
        for (i, c) in text.chars().enumerate() {
            for (row, dots) in font::glyph(c).iter().enumerate() {
                for column in (0..5).filter(|column| dots >> (4 - column) & 1 == 1) {
                    let at = (x + (i * ADVANCE + column) * scale, y + row * scale);
                    self.fill(at, (scale, scale), colour);
                }
            }
        }
    }

    /// The picture as a PNG file.
    pub fn png(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width.try_into()?, self.height.try_into()?);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_source_srgb(png::SrgbRenderingIntent::Perceptual);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.pixels.as_flattened())?;
        writer.finish()?;
        Ok(bytes)
    }
}

/// Width and height of a line of text in pixels.
pub fn text_size(text: &str, scale: usize) -> (usize, usize) {
    let dots = (text.chars().count() * ADVANCE).saturating_sub(1);
    (dots * scale, HEIGHT * scale)
}
