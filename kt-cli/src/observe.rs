//! Options that tell what expert layers did: `--stats` and `--heatmap`.

mod canvas;
mod font;
mod picture;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kt::Stats;

use crate::host::Model;
use crate::model::{check_writable, extension};

/// What to tell about the experts' work.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ObserveArgs {
    /// Say for every layer of experts where its time went, and how fast it read weights.
    #[arg(long)]
    pub stats: bool,
    /// Save how often each expert was chosen: as numbers (.json) or as a picture (.png).
    #[arg(long, value_name = "FILE", value_parser = HeatFile::of)]
    heatmap: Option<HeatFile>,
}

/// A file for a heat map, of a kind that its name tells.
#[derive(Debug, Clone, PartialEq)]
struct HeatFile {
    path: PathBuf,
    picture: bool,
}

impl HeatFile {
    fn of(text: &str) -> Result<Self, String> {
        let path = PathBuf::from(text);
        match extension(&path).as_deref() {
            Some("json") => Ok(HeatFile { path, picture: false }),
            Some("png") => Ok(HeatFile { path, picture: true }),
            _ => Err("the name must end in .json (numbers) or .png (a picture)".into()),
        }
    }
}

impl ObserveArgs {
    /// What the experts did in `wall`, as the lines of a report; nothing unless it was asked for.
    pub fn report(&self, what: &str, stats: &Stats, wall: Duration) -> String {
        if !self.stats {
            return String::new();
        }
        let (experts, wall) = (stats.total().wall.as_secs_f64(), wall.as_secs_f64());
        let text = format!("{what}: layers of experts took {experts:.3} s of {wall:.3} s\n{stats}");
        text.lines().map(|line| format!("stats    {line}\n")).collect()
    }

    /// Makes sure that the heat map can be saved, if it was asked for.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn check(&self) -> Result<()> {
        self.heatmap.as_ref().map_or(Ok(()), |file| check_writable(&file.path))
    }

    /// Saves the heat map of all that the model did, if it was asked for.
    ///
    /// # Errors
    /// The file cannot be written, or there is nothing to draw.
    pub fn save_heat_map(&self, model: &Model, name: &str) -> Result<()> {
        let Some(HeatFile { path, picture }) = &self.heatmap else { return Ok(()) };
        let map = model.experts().heat_map();
        if *picture {
            let name = Path::new(name).file_name().map_or(name.into(), |n| n.to_string_lossy());
            let png = picture::draw(&map, &name)?.png()?;
            std::fs::write(path, png).with_context(|| path.display().to_string())?;
        } else {
            map.save(path)?;
        }
        eprintln!("heat map {}", path.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_tells_the_kind() {
        let of = |text: &str| HeatFile::of(text).map(|f| f.picture);
        assert_eq!((of("a/b.json"), of("c.d.PNG")), (Ok(false), Ok(true)));
        for bad in ["a", "a.jpg", "png", ".png", ""] {
            assert!(of(bad).unwrap_err().contains(".json"), "{bad}");
        }
    }
}
